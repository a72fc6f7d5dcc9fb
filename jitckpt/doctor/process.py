"""The doctor's small process, with the libraries preloaded as in a worker: who has the calls, do steps count?

Run as a program; its last line is JSON.
"""

import ctypes
import json
import tempfile
import time

import torch

import jitckpt

NAMES = (
    "__cudaLaunchKernel",
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaMemcpyAsync",
    "cudaEventRecord",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "ncclAllReduce",
    "ncclAllGather",
    "ncclReduceScatter",
)
STEPS = 3
WAIT_SECONDS = 5.0


class Symbol(ctypes.Structure):
    """Dl_info of <dlfcn.h>."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def is_ours(name: str) -> bool:
    """Return whether a call by this name reaches the preloaded library first."""
    everything = ctypes.CDLL(None)
    if not hasattr(everything, name):
        return False
    found = Symbol()
    everything.dladdr(ctypes.cast(getattr(everything, name), ctypes.c_void_p), ctypes.byref(found))
    return found.file is not None and found.file.endswith(b"/libjitckpt.so")


def steps_seen() -> int:
    """Train for STEPS steps under protection; return how many of them the library saw end on the device."""
    model = torch.nn.Linear(8, 8).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        job = jitckpt.init(checkpoint_dir=folder, model=model, optimizer=optimizer)
        for _ in range(STEPS):
            model(torch.ones(2, 8, dtype=torch.float32, device="cuda")).sum().backward()
            optimizer.step()
        torch.cuda.synchronize()
        until = time.monotonic() + WAIT_SECONDS
        while job.steps_on_device() < STEPS and time.monotonic() < until:
            time.sleep(0.01)
        seen = job.steps_on_device()
        job.close()
    return seen


def main() -> None:
    cuda = torch.version.cuda
    facts = {
        "torch": torch.__version__,
        "cuda": cuda,
        "nccl": None if cuda is None else ".".join(map(str, torch.cuda.nccl.version())),
        "bound": {name: is_ours(name) for name in NAMES},
        "steps": 0 if cuda is None else steps_seen(),
        "made_steps": STEPS,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
