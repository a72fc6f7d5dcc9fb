# mypy: ignore-errors
"""What the trainings here say of their ends, to be compared bit for bit."""

import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

FSDP = int(os.environ.get("FSDP", "0"))  # which version of it, if one
PRECISION = os.environ.get("PRECISION", "")  # bf16 or fp16: of the passes, not of the parameters
NORM = nn.LayerNorm if FSDP == 2 else nn.BatchNorm1d  # whose buffers FSDP2 leaves in another precision
IS_STATEFUL = os.environ.get("LOADER") == "stateful"
if IS_STATEFUL:
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
else:
    from torch.utils.data import DataLoader  # noqa: F401  # the programs take it from here


def digest(*parts):
    found = hashlib.sha256()

    def walk(part):
        if hasattr(part, "to_local"):
            part = part.to_local()  # of a DTensor, what the rank holds
        if hasattr(part, "__tensor_flatten__"):
            names, context = part.__tensor_flatten__()
            walk([type(part).__name__, context, *(getattr(part, name) for name in names)])
        elif isinstance(part, torch.Tensor):
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                found.update(str(key).encode())
                walk(part[key])
        elif isinstance(part, list | tuple):
            for one in part:
                walk(one)
        else:
            found.update(repr(part).encode())

    walk(parts)
    return found.hexdigest()[:16]


def state_of(optimizer):
    """Return an optimizer's state on this rank, in the order of its parameters."""
    return [optimizer.state.get(one, {}) for group in optimizer.param_groups for one in group["params"]]


def log_loss(step, loss):
    """Append a loss to the rank's log, as a script does that follows its training."""
    with open(f"{sys.argv[1]}/loss-{os.environ['RANK']}.jsonl", "a") as file:
        print(json.dumps([step, loss.item()]), file=file)


def may_be_killed():
    """With LATE=R:N, kill rank R before its N-th optimizer step, once the others have made it.

    With STAYS=N:FILE stay before this rank's N-th one for good, and say so by making the file.
    """
    if ordered := os.environ.get("STAYS"):
        number, _, file = ordered.partition(":")
        _before_step(int(number), partial(_stay, file))
    if not (ordered := os.environ.get("LATE")) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    rank, step = map(int, ordered.split(":"))
    if rank == int(os.environ["RANK"]):
        _before_step(step, _die_late)


def _before_step(number, do):
    steps = []

    def begins(*_):
        steps.append(None)
        if len(steps) == number:
            do()

    register_optimizer_step_pre_hook(begins)


def _die_late():
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)


def _stay(file):
    with open(file, "w"):
        pass
    time.sleep(3600)


_passed = Counter()


def passes(place):
    """With DIE=R/PLACE/N, kill rank R as it comes to this place for the N-th time."""
    if not (ordered := os.environ.get("DIE")) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    rank, name, number = ordered.split("/")
    _passed[place] += 1
    if (int(rank), name, int(number)) == (int(os.environ["RANK"]), place, _passed[place]):
        os.kill(os.getpid(), signal.SIGKILL)
