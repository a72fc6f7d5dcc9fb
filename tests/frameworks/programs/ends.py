# mypy: ignore-errors
"""What the trainings here say of their ends, to be compared bit for bit."""

import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        if isinstance(part, torch.Tensor):
            found.update(part.detach().cpu().contiguous().numpy().tobytes())
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


def log_loss(step, loss):
    """Append a loss to the rank's log, as a script does that follows its training."""
    with open(f"{sys.argv[1]}/loss-{os.environ['RANK']}.jsonl", "a") as file:
        print(json.dumps([step, loss.item()]), file=file)


def may_be_killed():
    """With LATE=R:N, kill rank R before its N-th optimizer step, once the others have made it."""
    if not (ordered := os.environ.get("LATE")) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    rank, step = map(int, ordered.split(":"))
    steps = []

    def begins(*_):
        steps.append(None)
        if rank == int(os.environ["RANK"]) and len(steps) == step:
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(begins)


_passed = Counter()


def passes(place):
    """With DIE=R/PLACE/N, kill rank R as it comes to this place for the N-th time."""
    if not (ordered := os.environ.get("DIE")) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    rank, name, number = ordered.split("/")
    _passed[place] += 1
    if (int(rank), name, int(number)) == (int(os.environ["RANK"]), place, _passed[place]):
        os.kill(os.getpid(), signal.SIGKILL)
