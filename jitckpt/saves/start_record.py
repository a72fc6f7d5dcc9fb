"""How the last start of a job was made, in job.json, for the next one to say how it differs."""

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from jitckpt.errors import SaveError
from jitckpt.saves import folders, layout, starts
from jitckpt.system import regular_file

SHOWN = 300  # characters of a setting
_PLAIN = (bool, int, float, str, tuple, list, type(None))


def settings(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return what makes this start what it is, as far as can be seen: arguments, hyperparameters, seed."""
    found = {"arguments": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])}
    for number, optimizer in enumerate(optimizers):
        # What it was made with: a scheduler, or a state that is loaded, changes its groups.
        made_with = [f"{name}={value!r}" for name, value in optimizer.defaults.items() if _is_shown(value)]
        name = "optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        found[name] = f"{type(optimizer).__name__}({', '.join(made_with)})"
    found["random seed"] = str(torch.initial_seed())
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a phrase for each setting that was another one."""
    return [
        f"{name} {now[name]:.{SHOWN}} (was {before[name]:.{SHOWN}})"
        for name in now
        if name in before and before[name] != now[name]
    ]


def who_is_there(ranks: int, shards: int, root: Path) -> str:
    """Return what every start says: how often the state is there, and where saves go."""
    if shards == 1:
        state = "the whole state" if ranks == 1 else f"{ranks} copies of the state"
    else:
        copies = ranks // shards
        state = f"{shards} shards of the state, {copies} {'copy' if copies == 1 else 'copies'} of each"
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {state}; saves go to {root}."


def told(root: Path, step: int, saved: float, job: str, now: Mapping[str, str]) -> list[str]:
    """Return what a start says that goes on from a save: from which one, and how it differs from the last."""
    before = _read(root)
    sentences = [f"goes on from step {step}, saved at {_date(saved)} by job {job} in {root}."]
    finished = before.get("finished")
    if isinstance(finished, float):
        sentences.append(
            f"that job has ended successfully at {_date(finished)}; what came after step {step} is made "
            "again. To train anew, choose another checkpoint directory."
        )
    start = before.get("start")
    known = start.items() if isinstance(start, dict) else ()
    if differs := differences({name: text for name, text in known if isinstance(text, str)}, now):
        sentences.append(
            f"this start differs from the one before in {root}: {'; '.join(differs)}. It goes on from step "
            f"{step} all the same, with that save's hyperparameters and random numbers; for another training "
            "choose another checkpoint directory."
        )
    return sentences


def note_start(root: Path, now: Mapping[str, str], number: int = 0) -> None:
    """Keep the settings of this start, which has this number. Raises SaveError, OSError."""
    starts.check(root, number)
    before = _read(root)
    content = {name: value for name, value in before.items() if name != "finished"} | {"start": dict(now)}
    if content != before:
        _write(root, content)


def note_finished(root: Path, number: int = 0) -> None:
    """The job has ended successfully, in the start of this number. Raises SaveError, OSError."""
    starts.check(root, number)
    _write(root, _read(root) | {"finished": time.time()})


def _read(root: Path) -> dict[str, Any]:
    path = root / layout.JOB_FILE
    return layout.parse_object(regular_file.content_of(path), str(path))


def _write(root: Path, content: Mapping[str, Any]) -> None:
    if "job" not in content:
        raise SaveError(f"{root / layout.JOB_FILE} has no job id.")
    folders.write_by_rename(root / layout.JOB_FILE, json.dumps({**content, "format": layout.FORMAT}).encode())


def _is_shown(value: object) -> bool:
    return isinstance(value, _PLAIN)


def _date(when: float) -> str:
    return datetime.fromtimestamp(when).isoformat(sep=" ", timespec="seconds")
