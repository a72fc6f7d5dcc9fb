"""What the workloads share: flags, the process group, and what is printed to be compared bit for bit."""

import argparse
import hashlib
import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer


def arguments(description: str, **sizes: tuple[int, str]) -> argparse.Namespace:
    """Return the flags that each has, and those of its model: a small default and what it counts."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = {"steps": (20, "optimizer steps"), "seed": (0, "for the weights, the data and the dropout")}
    for flag, (default, meaning) in (common | sizes).items():
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--protect", action="store_true", help="call jitckpt.init: user-level mode")
    return parser.parse_args()


def begin(seed: int) -> int:
    """Join the others, each rank on its device; return the rank. All draw the same weights next."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    torch.manual_seed(seed)
    return distributed.get_rank()


def tell(step: int, loss: Tensor, speaker: int = 0) -> None:
    """Print a loss, all its digits, on one rank."""
    if distributed.get_rank() == speaker:
        # One write with its newline: the ranks share their output.
        print(f"step {step + 1}: loss {loss.item():.9g}\n", end="", flush=True)


def end(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Print the digests of what this rank has in the end, and leave the others."""
    held = [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state[parameter].items())  # a restart may fill it in another order
    ]
    model_digest, optimizer_digest = digest(model.state_dict().values()), digest(held)
    rank = distributed.get_rank()
    print(f"rank {rank}: model {model_digest} optimizer {optimizer_digest}\n", end="", flush=True)
    distributed.destroy_process_group()


def digest(values: Iterable[object]) -> str:
    """Return the SHA-256 of all that are tensors, of sharded ones of this rank's part."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            part = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
            found.update(part.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
