"""The training of memory_methods.py: windows of steps with snapshots and without, by turns; then on and on.

usage: memory_methods_training.py WINDOWS STEPS-IN-A-WINDOW PAUSE full-shard|replicas

Each rank prints the times of the windows' steps and what its host has sent. PAUSE: seconds of each step in
which a device would compute, and here nobody uses a processor.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import jitckpt
from jitckpt.worker.saving.snapshots import Snapshots

WARM_UP = 10
WIDTH, LAYERS, BATCH = 1024, 6, 16


def sent() -> int:
    """Return the bytes that this host has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("cable:")).split(":")[1].split()[8])


def main() -> None:
    windows, length, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
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
    is_due, snapshots = Snapshots.is_due, True

    def in_turn(self: Snapshots, step: int) -> bool:
        return snapshots and is_due(self, step)

    Snapshots.is_due = in_turn  # type: ignore[method-assign]
    times: list[float] = []
    counted: list[int] = []
    found: list[tuple[list[float], list[int]]] = []  # of each window: its steps' times, and bytes sent before
    for step in job.steps(1 << 30):
        place = step - WARM_UP
        snapshots = snapshots and place != -3
        if 0 <= place <= windows * length and place % length == 0:
            if place:
                found.append((list(times), [*counted, sent()]))
            times.clear()
            counted.clear()
            snapshots = place == windows * length or place // length % 2 == 0
            if place == windows * length:
                medians = [statistics.median(of) for of, _ in found]
                said = {"rank": dist.get_rank(), "seconds": medians, "sent": [of for _, of in found]}
                print(f"windows {json.dumps(said)}\n", end="", flush=True)
        began = time.perf_counter()
        counted.append(sent())
        batch = torch.randn(BATCH, WIDTH, device="cuda")
        optimizer.zero_grad()
        time.sleep(pause)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
