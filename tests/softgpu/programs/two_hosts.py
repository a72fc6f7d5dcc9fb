"""Sums over two ranks whenever it is told to on its standard input."""

import os
import sys
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


def sum_ranks(patience: float) -> None:
    tensor = torch.tensor([rank + 1], device="cuda")
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    time.sleep(patience)
    if patience > 0 and not work.is_completed():
        print("waits", flush=True)
    work.wait()
    print("sum", tensor.item(), flush=True)


sum_ranks(0)
while sys.stdin.readline() == "sum\n":
    sum_ranks(0.5)
