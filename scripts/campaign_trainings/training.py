"""What the trainings of a campaign in transparent mode share; they know nothing of jitckpt."""

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

BATCH, WIDTH = 8, 16


@dataclass
class Training:
    """backward: the forward and backward pass of a batch (BATCH, WIDTH). data_index: whose batches it gets.

    steps: make each optimizer's step, one after the other.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    backward: Callable[[Tensor], object]
    data_index: int
    steps: Sequence[Callable[[], object]]


def run(build: Callable[[], Training]) -> None:
    """Train, and print each step, and of each rank the digest of what it ends with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args, _ = parser.parse_known_args()  # the others are for other trainings
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    training = build()
    torch.manual_seed(100 + training.data_index)
    for step in range(1, args.steps + 1):
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.backward(torch.randn(BATCH, WIDTH).cuda())
        for make_step in training.steps:
            make_step()
        if rank == 0:
            print(f"step {step}: made\n", end="", flush=True)
    print(f"rank {rank}: final state {digest(training)}\n", end="", flush=True)
    dist.destroy_process_group()


def digest(training: Training) -> str:
    """The SHA-256 of parameters, buffers, optimizer state and random numbers."""
    found = hashlib.sha256()
    states = [state for optimizer in training.optimizers for state in optimizer.state.values()]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    for tensor in (*training.model.parameters(), *training.model.buffers(), *values):
        part = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
        found.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(torch.rand(3).numpy().tobytes() + torch.rand(3, device="cuda").cpu().numpy().tobytes())
    return found.hexdigest()
