"""A training whose global batch is 24 samples with 4, 3 or 2 ranks, run by test_elastic.py.

usage: elastic_training.py [--accumulation N] [--save-every N] [--stop-after STEP] [--stay RANKS:STEP ...]
                           [--full] [--dies-with FILE]

Each rank prints what it has had in each step, and a digest of all its state in the end. With --stay rank 0 of
so many ranks stays behind this step, until it is ended. With --full no rank's state has a replica. With
--dies-with each rank is killed once the file is there, if it was not as the rank began.
"""

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import jitckpt

SAMPLES, BATCH, FEATURES, EPOCHS = 96, 2, 8, 4
LONG = 600.0  # seconds


def say(text: str) -> None:
    """Print a line in one piece: several ranks may write to one file."""
    os.write(1, f"{text}\n".encode())


def die_with(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true")
parser.add_argument("--accumulation", type=int, default=3)
parser.add_argument("--save-every", type=int)
parser.add_argument("--stop-after", type=int, default=0)
parser.add_argument("--stay", nargs="*", default=[])
parser.add_argument("--dies-with", type=Path)
args = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
if args.dies_with and not args.dies_with.exists():
    threading.Thread(target=die_with, args=(args.dies_with,), daemon=True).start()
torch.manual_seed(rank)
body = nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1)).to("cuda")
model: Any = fully_shard(body) if args.full else DistributedDataParallel(body)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
random = torch.Generator().manual_seed(1)
features = torch.randn(SAMPLES, FEATURES, generator=random)
data = TensorDataset(torch.arange(SAMPLES), features, features.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=5))
job = jitckpt.init(
    model=model, optimizer=optimizer, accumulation=args.accumulation, save_every=args.save_every
)
step = job.restore()
total, had = 0.0, list[int]()
for _ in job.epochs(EPOCHS):
    for numbers, inputs, targets in job.batches(loader):
        if step == args.stop_after > 0:
            save = Path("ckpt") / f"step-{step:010}"
            while len([*save.glob("*/metadata.json")]) < world:  # one of each rank
                time.sleep(0.1)
            sys.exit(3)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(job.sync_gradients)
        with nullcontext() if args.full or job.sync_gradients else model.no_sync():
            loss = (model(inputs.cuda()) - targets.cuda()).square().mean() / job.accumulation_steps
            loss.backward()
        total, had = total + loss.item(), had + numbers.tolist()
        if job.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            torch.cuda.synchronize()
            say(f"step {step} rank {rank} of {world}: {total.hex()} {had}")
            total, had = 0.0, []
            if rank == 0 and f"{world}:{step}" in args.stay:
                time.sleep(LONG)
state = [*model.parameters(), *(part for one in optimizer.state.values() for part in one.values())]
parts = [getattr(one, "_local_tensor", one).detach().cpu() for one in state]
digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in parts))
say(f"rank {rank} of {world} ends with {digest.hexdigest()}")
