"""Runs a training script as one of several ranks that share one GPU. usage: one_gpu.py SCRIPT [ARGUMENTS]

NCCL takes two ranks on one GPU only for ranks of different hosts, so each gets a host of its own. What
JITCKPT_GPU_TRY says is done to the rank: "gil" (the training thread waits for the device with the GIL held),
"sticky=RANK:STEP" (a device-side assertion fails in that step of the first start, after which every call
returns an error).
"""

import ctypes
import faulthandler
import os
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

STACKS_AFTER = 40.0  # seconds: by then all have ended, or where they hang is worth knowing
steps_begun = 0


def hold_gil(*_: Any) -> None:
    ctypes.PyDLL(None).cudaDeviceSynchronize()  # unlike CDLL, PyDLL does not let the GIL go


def fail(rank: int, step: int) -> None:
    global steps_begun  # noqa: PLW0603
    steps_begun += 1
    if int(os.environ["RANK"]) == rank and steps_begun == step and os.environ["JITCKPT_RESTART"] == "0":
        torch.zeros(1, device="cuda")[torch.tensor([1 << 40], device="cuda")]
        torch.cuda.synchronize()


def main() -> None:
    if torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    faulthandler.dump_traceback_later(STACKS_AFTER)
    what, _, where = os.environ.get("JITCKPT_GPU_TRY", "").partition("=")
    if what == "gil":
        register_optimizer_step_pre_hook(hold_gil)
    elif what == "sticky":
        rank, step = map(int, where.split(":"))
        register_optimizer_step_pre_hook(lambda *_: fail(rank, step))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
