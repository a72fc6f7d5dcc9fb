"""Plain PyTorch DDP that knows nothing of jitckpt: a classifier with dropout and AdamW.

jitckpt exec --device softgpu -- torchrun --standalone --nproc-per-node 2 examples/plain_ddp.py
"""

import argparse
import hashlib
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def batches(rank: int, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (batch, width) and their classes, for every step; each rank has its own."""
    random = torch.Generator().manual_seed(1000 * args.seed + rank)
    for _ in range(args.steps):
        inputs = torch.randn(args.batch, args.width, generator=random)
        yield inputs, inputs[:, : args.classes].argmax(dim=1)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The SHA-256 of all parameters and of the optimizer's state for them."""
    sha256 = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            sha256.update(tensor.detach().cpu().numpy().tobytes())
    return sha256.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default, meaning in (
        ("--steps", 20, "optimizer steps"),
        ("--batch", 32, "examples in a minibatch of one rank"),
        ("--width", 64, "features of an example, and of each layer"),
        ("--layers", 3, "hidden layers"),
        ("--classes", 10, "classes to tell apart"),
        ("--seed", 0, "for the weights, the data and the dropout"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{meaning} (default {default})")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    torch.manual_seed(args.seed)
    layers: list[nn.Module] = []
    for _ in range(args.layers):
        layers += [nn.Linear(args.width, args.width), nn.LayerNorm(args.width), nn.GELU(), nn.Dropout(0.1)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(args.width, args.classes)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(args.seed + rank)  # every rank drops other features

    for step, (inputs, classes) in enumerate(batches(rank, args), start=1):
        loss = F.cross_entropy(model(inputs.cuda()), classes.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.9g}\n", end="", flush=True)
    # One write with its newline: the ranks share their output.
    print(f"rank {rank}: final state {digest(model, optimizer)}\n", end="", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
