"""Orders a fault of each kind that one process can have, and prints as JSON what torch makes of it.

Ends with the sticky error uncaught. The devices are three: one for each failure that lasts.
"""

import ctypes
import json
from collections.abc import Callable

import torch

from jitckpt.faults.injection import arm_device, parse_fault

softgpu = ctypes.CDLL(None)
MEBIBYTE = 1 << 20


def order(text: str) -> None:
    answer = ctypes.create_string_buffer(512)
    if softgpu.softgpu_fault(text.encode(), answer, len(answer)) != 0:
        raise ValueError(answer.value.decode())


def first_line(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


def retries() -> tuple[int, int]:
    statistics = torch.cuda.memory_stats(0)
    return statistics["num_alloc_retries"], statistics["num_ooms"]


said: dict[str, object] = {}

# One failed allocation: torch gives back what it has cached, tries again, and nobody notices.
cached = torch.empty(64 * MEBIBYTE, dtype=torch.uint8, device="cuda:0")
del cached
order("kind=failed-allocation")
kept = torch.empty(128 * MEBIBYTE, dtype=torch.uint8, device="cuda:0")
said["failed-allocation"] = [*retries(), torch.cuda.memory_reserved(0) // MEBIBYTE]

order("kind=oom call=1")
said["oom"] = first_line(lambda: torch.empty(256 * MEBIBYTE, dtype=torch.uint8, device="cuda:0"))
said["oom counted"] = retries()
order("kind=heal")
said["healed"] = first_line(lambda: torch.empty(256 * MEBIBYTE, dtype=torch.uint8, device="cuda:0"))

# Those of --fault come with an allocation that torch has not enough cached for.
del kept
arm_device(parse_fault("rank=0 step=1 kind=failed-allocation"))
said["--fault failed-allocation"] = retries()
said["--fault oom"] = first_line(lambda: arm_device(parse_fault("rank=0 step=1 kind=oom")))
order("kind=heal")

# A slow kernel: it has a thousand seconds to go when it is healed.
values = torch.zeros(1 << 20, device="cuda:0")
torch.cuda.synchronize(0)
order("kind=slow factor=1000000")
values.add_(1).sqrt_()
said["slow"] = torch.cuda.current_stream(0).query()
order("kind=heal")
said["slow healed"] = values.sum().item()

for device, kind in ((1, "device-lost"), (2, "ecc"), (0, "sticky")):
    with torch.cuda.device(device):
        one = torch.ones(8, device="cuda")
        torch.cuda.synchronize()
        order(f"kind={kind} call=2")
        one.add_(1)
        at_launch = first_line(lambda one=one: one.mul_(2))  # type: ignore[misc]
        said[kind] = [
            at_launch,
            first_line(torch.cuda.synchronize),
            first_line(one.tolist),
            first_line(lambda: torch.ones(1, device="cuda")),
            first_line(torch.cuda.Event().record),
        ]
print(json.dumps(said), flush=True)
torch.cuda.synchronize(0)
print("the process went on")
