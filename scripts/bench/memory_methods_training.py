"""The training of memory_methods.py: windows of steps with snapshots and without, by turns; then on and on.

usage: memory_methods_training.py WINDOWS STEPS-IN-A-WINDOW PAUSE full-shard|replicas

Each rank prints the times of the windows' steps and what its host has sent. PAUSE: seconds of each step in
which a device would compute, and here nobody uses a processor.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from windows import WARM_UP, Windows, snapshots_in

import jitckpt

WIDTH, LAYERS, BATCH = 1024, 6, 16


def sent() -> int:
    """Return the bytes that this host has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("cable:")).split(":")[1].split()[8])


def main() -> None:
    windows, pause = Windows(int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
    model: nn.Module = layers
    if sys.argv[4] == "replicas":
        model = DistributedDataParallel(layers)
    else:
        for layer in layers:
            fully_shard(layer)
        fully_shard(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    job = jitckpt.init(model=model, optimizer=optimizer)
    snapshots_in(windows)
    counted: list[int] = []  # bytes sent before each step since the first window's
    for step in windows.over(job.steps(1 << 30)):
        if step >= WARM_UP:
            counted.append(sent())
        if step == windows.steps:
            length = windows.length
            of = [counted[first : first + length + 1] for first in range(0, windows.number * length, length)]
            said = {"rank": dist.get_rank(), "seconds": windows.medians, "sent": of}
            print(f"windows {json.dumps(said)}\n", end="", flush=True)
        batch = torch.randn(BATCH, WIDTH, device="cuda")
        optimizer.zero_grad()
        time.sleep(pause)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
