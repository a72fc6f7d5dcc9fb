"""The training of memory_tier.py: windows of steps with snapshots and without, by turns. Prints their times.

usage: memory_tier_training.py WINDOWS STEPS-IN-A-WINDOW PAUSE

PAUSE: seconds of each step in which a device would compute, and here nobody uses a processor.
"""

import json
import os
import sys
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from windows import Windows, snapshots_in

import jitckpt

WIDTH, BATCH = 512, 256


def main() -> None:
    windows, pause = Windows(int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    job = jitckpt.init(model=model, optimizer=optimizer)
    snapshots_in(windows)
    for _ in windows.over(job.steps(windows.steps)):
        batch = torch.randn(BATCH, WIDTH, device="cuda")
        optimizer.zero_grad()
        time.sleep(pause)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"windows {json.dumps(windows.medians)}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
