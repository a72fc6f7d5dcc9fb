"""Finds the generators of random numbers that the script has made, by its variables and inside of those.

They go by the names that lead to them, the same in every start: `noise` of the module, `train.noise` of a
function, `augment.rng` and `noises[0]` inside.
"""

import random
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import numpy
import torch
from torch import nn

from jitckpt.data.kept_generator import GENERATORS
from jitckpt.worker.frames import scripts_frames, variables_of
from jitckpt.worker.kept_by_extra import kept_by
from jitckpt.worker.value_marks import attributes_of, is_own

DEPTH = 3
MOST_PARTS = 100  # of a container in which they are looked for
MOST_LOOKED_AT = 1000  # in one variable


def generators_from(frame: FrameType | None, extra: Any) -> Iterator[tuple[str, object]]:
    """Yield them, from a frame outwards, with names; but for those that `extra` keeps."""
    told, known = kept_by(extra)
    known = {*known, *map(id, _of_the_process())}
    names = {*told}
    for one in scripts_frames(frame):
        code = one.f_code
        function = "" if code.co_name == "<module>" else f"{code.co_qualname}."
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        for name, value in variables_of(one).items():
            called = f"{function}{name}" if name in local else name
            if not name.startswith("__") and name not in told and called not in names:
                names.add(called)
                yield from _inside(called, value, known, DEPTH, iter(range(MOST_LOOKED_AT)))


def _of_the_process() -> list[object]:
    """Return the generators that are kept in any case."""
    return [
        torch.default_generator,
        numpy.random.mtrand._rand,
        getattr(random.getstate, "__self__", None),
        *(torch.cuda.default_generators if torch.cuda.is_available() else ()),
    ]


def _inside(
    name: str, value: object, known: set[int], depth: int, left: Iterator[object]
) -> Iterator[tuple[str, object]]:
    if isinstance(value, GENERATORS):
        if id(value) not in known and not isinstance(value, random.SystemRandom):  # which has no state
            known.add(id(value))
            yield name, value
        return
    if next(left, None) is None or not depth or id(value) in known:
        return
    if isinstance(value, list | tuple | dict):
        parts = [*value.items()] if isinstance(value, dict) else enumerate(value)
        inside = [(f"{name}[{key!r}]", part) for key, part in islice(parts, MOST_PARTS)]
    elif isinstance(value, nn.Module):
        every = [(f"{name}.{path}".rstrip("."), module) for path, module in value.named_modules()]
        inside = [(f"{path}.{key}", part) for path, module in every for key, part in vars(module).items()]
        inside = [(called, part) for called, part in inside if isinstance(part, GENERATORS)]
    elif is_own(value):
        inside = [(f"{name}.{key}", part) for key, part in attributes_of(value).items()]
    else:
        return
    known.add(id(value))
    for called, part in inside:
        yield from _inside(called, part, known, depth - 1, left)
