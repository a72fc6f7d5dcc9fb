"""What the trainings of the memory tier's campaign share; most have state that no other rank holds."""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

import jitckpt

BATCH, WIDTH = 8, 16
SECONDS = 0.05  # of each minibatch: a snapshot of the one before is whole by then


@dataclass
class Built:
    """passes: make the forward and the backward pass of a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    passes: Callable[[Tensor], object]


def passes_of(model: nn.Module) -> Callable[[Tensor], object]:
    """Return the usual passes."""

    def passes(batch: Tensor) -> None:
        loss = (model(batch) - batch).square().mean()
        time.sleep(SECONDS)
        loss.backward()

    return passes


def run(build: Callable[[nn.Sequential], Built], alike: int = 1) -> None:
    """Train under protection, and print each step. alike: so many neighbours get the same batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--width", type=int, default=WIDTH)
    args, _ = parser.parse_known_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, args.width)]
    built = build(nn.Sequential(*layers).cuda())
    torch.manual_seed(100 + dist.get_rank() // alike)
    job = jitckpt.init(model=built.model, optimizer=built.optimizer, save_every=args.save_every or None)
    for step in job.steps(args.steps):
        built.optimizer.zero_grad()
        built.passes(torch.randn(BATCH, args.width).cuda())
        built.optimizer.step()
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(f"step {step + 1} of {args.steps}\n", end="", flush=True)
    dist.destroy_process_group()
