"""Two ranks whose network is cut and comes back, and then an asynchronous error of NCCL on rank 1.

Arguments: the store's file, the rank. RANK is set, as by a launcher.
"""

import ctypes
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

softgpu = ctypes.CDLL(None)
store, rank = sys.argv[1], int(sys.argv[2])


def order(text: str) -> None:
    answer = ctypes.create_string_buffer(512)
    if softgpu.softgpu_fault(text.encode(), answer, len(answer)) != 0:
        raise ValueError(answer.value.decode())


def behind_rank_0(place: str) -> None:
    """Have rank 1 wait until rank 0 is there."""
    there = Path(f"{store}-{place}")
    if rank == 0:
        there.touch()
    while not there.exists():
        time.sleep(0.01)


torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
values = torch.ones(4, device="cuda")
dist.all_reduce(values)
torch.cuda.synchronize()

if rank == 1:
    order("kind=network-cut peer=0")
dist.all_reduce(values)
time.sleep(0.3)  # longer than it would need
assert not torch.cuda.current_stream().query(), "the network was not cut"
behind_rank_0("cut")
if rank == 1:
    order("kind=heal")
torch.cuda.synchronize()
assert values.tolist() == [4.0] * 4, values

if rank == 0:
    dist.all_reduce(values)
    print("waits", flush=True)
behind_rank_0("waits")  # torch ends that rank, too, once it hears of the error
if rank == 1:
    order("kind=collective-error")
    dist.all_reduce(values)
    print("waits", flush=True)
torch.cuda.synchronize()
print("went on", flush=True)
