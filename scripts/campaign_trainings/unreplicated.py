"""What the trainings of a campaign share in which no rank holds what another holds."""

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn

import jitckpt

BATCH, WIDTH = 8, 16
SECONDS = 0.05  # of each minibatch: a snapshot of the one before is whole by then
Built = tuple[nn.Module, torch.optim.Optimizer]


def run(build: Callable[[nn.Sequential], Built]) -> None:
    """Train under protection, and print each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--width", type=int, default=WIDTH)
    args, _ = parser.parse_known_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, args.width)]
    model, optimizer = build(nn.Sequential(*layers).cuda())
    torch.manual_seed(100 + dist.get_rank())
    job = jitckpt.init(model=model, optimizer=optimizer, save_every=args.save_every or None)
    for step in job.steps(args.steps):
        optimizer.zero_grad()
        batch = torch.randn(BATCH, args.width).cuda()
        loss = (model(batch) - batch).square().mean()
        time.sleep(SECONDS)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(f"step {step + 1} of {args.steps}\n", end="", flush=True)
    dist.destroy_process_group()
