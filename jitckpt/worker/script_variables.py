"""Variables of the script that its loop carries on: counters, histories, generators of random numbers.

No save holds them, so after a restart they are as the script sets them before the loop. Which they are is
seen in the loop's code, by what it reads before it writes it, and in what changes between the first steps.
"""

import dis
import inspect
import random
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from jitckpt.system import installed

LOOKS = 3  # after the first steps: a loop does in each iteration what it does in these
MOST_VALUES = 2000  # that are looked at in one variable
DEPTH = 3  # to which objects of the script's own classes are looked into
SHOWN = 8  # names
CLOCKS = (time.time, time.perf_counter, time.monotonic)
CLOCK_SECONDS = 3600.0  # what is so near to a clock was read from it
GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
OTHERS_AFFAIR = (nn.Module, Optimizer, DataLoader, Dataset, Sampler, type)
CONTAINERS = (list, tuple, dict, deque, set)
VALUES = (type(None), bool, int, float, complex, str, bytes, numpy.ndarray, numpy.generic, Tensor)
_OPAQUE = "*opaque"
_LIBRARIES = installed.folders()
_ACCESS = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")

TEXT = (
    "The loop changes variables of the script that no save holds: {names}. After a failure they are as the "
    "script sets them before the loop. If the training, or what you print of it, depends on them, keep them "
    "in `extra` (an object with state_dict and load_state_dict, given to jitckpt.init)."
)
COUNTER = " A counter of optimizer steps can begin with job.restore()."


class ScriptVariables:
    """Of one job; told whenever the loop goes on after optimizer steps."""

    def __init__(
        self, given: Iterable[object], extra: object, steps: Callable[[], int], warn: Callable[[str], None]
    ) -> None:
        """given: objects that others look after. steps: how many optimizer steps were made."""
        self._given, self._extra = {*map(id, given)}, extra
        self._steps, self._warn = steps, warn
        self._place: tuple[CodeType, int] | None = None  # of the first loop that makes steps
        self._before: dict[str, object] = {}
        self._changed: dict[str, None] = {}
        self._looks = 0
        self.script_restores = False  # it has called restore() itself, and can count from there

    def look(self, frame: FrameType | None) -> None:
        """The script asks for its next minibatch from this frame; a generator of it may lie between."""
        if self._looks < LOOKS:
            try:
                self._look(frame)
            except Exception:  # what a variable's own methods raise is not the training's affair
                self._looks = LOOKS

    def _look(self, frame: FrameType | None) -> None:
        while frame is not None and (frame.f_code.co_flags & inspect.CO_GENERATOR or not is_scripts(frame)):
            frame = frame.f_back
        if frame is None:
            return
        place = frame.f_code, frame.f_lasti
        self._place = self._place or place
        if place != self._place:
            return
        self._looks += 1
        now = self._marks(frame)
        for name, mark in now.items():
            if name in self._before and self._before[name] != mark:
                self._changed[name] = None
        self._before = now
        if self._looks == LOOKS and self._changed:
            names = [*self._changed]
            text = TEXT.format(names=", ".join(names[:SHOWN]) + (" ..." if names[SHOWN:] else ""))
            self._warn(text + (COUNTER if any("." not in name for name in names) else ""))

    def _marks(self, frame: FrameType) -> dict[str, object]:
        scope = _variables_of(frame)
        kept_names, kept = _kept_by(self._extra)
        kept |= self._given
        read, carried = read_first(frame.f_code, frame.f_lasti)
        marks: dict[str, object] = {}
        for name, value in scope.items():
            if name in kept_names or id(value) in kept or name.startswith("__"):
                continue
            if isinstance(value, GENERATORS):
                marks[name] = _state_of(value)
            elif name in carried and not isinstance(value, (*CONTAINERS, *OTHERS_AFFAIR)):
                if not self._is_known(value, frame.f_code):
                    marks[name] = _rebound(value)
            elif name in read:
                marks |= _inside(name, value, kept)
        return marks

    def _is_known(self, value: object, code: CodeType) -> bool:
        if type(value) is int:
            return (self.script_restores and value == self._steps()) or "first" in code.co_names
        return type(value) is float and any(abs(value - clock()) < CLOCK_SECONDS for clock in CLOCKS)


def _variables_of(frame: FrameType) -> dict[str, object]:
    """Return what a frame's code can read by name, and leave nothing of it with the frame.

    Before Python 3.13 a function's frame keeps the dict that it was asked for, and all in it (PEP 667): the
    outputs of one minibatch would stay in the device's memory as long as the loop runs.
    """
    local = frame.f_locals
    scope = {**frame.f_globals, **local}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        local.clear()
    return scope


def is_scripts(frame: FrameType) -> bool:
    """Whether its code is the user's own, and no library's."""
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))


@cache
def read_first(code: CodeType, at: int) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the loop around an instruction reads before it writes it, and what of that it writes."""
    instructions = [*dis.get_instructions(code)]
    spans = [
        (one.offset - one.argval, one.argval, one.offset)
        for one in instructions
        if "JUMP_BACKWARD" in one.opname and one.argval <= at <= one.offset
    ]
    _, begin, end = min(spans, default=(0, 0, -1))
    read: dict[str, None] = {}
    written: set[str] = set()
    for one in instructions:
        if begin <= one.offset <= end and "AND_CLEAR" not in one.opname:
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            for kind, name in zip(_kinds(one.opname), names, strict=False):
                if kind == "STORE":
                    written.add(name)
                elif name not in written:
                    read[name] = None
    return frozenset(read), frozenset(written & read.keys())


def _kinds(operation: str) -> Sequence[str]:
    return _ACCESS.findall(operation)


def _rebound(value: object) -> object:
    """Return what is another once a variable is set to something else."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    return (id(value), value._version) if isinstance(value, Tensor) else id(value)


def _inside(name: str, value: object, kept: set[int]) -> dict[str, object]:
    """Return marks of what an object of the script's changes in its place, by names.

    What has objects inside that are no values (events, files) is not looked at.
    """
    left = MOST_VALUES

    def mark(one: Any, depth: int) -> object:
        nonlocal left
        left -= 1
        if left < 0 or depth < 0 or id(one) in kept:
            return None
        if isinstance(one, GENERATORS):
            return _state_of(one)
        if isinstance(one, CONTAINERS):
            parts = [*one.values()] if isinstance(one, dict) else [*one]
            marks = [mark(part, depth - 1) for part in parts[:MOST_VALUES]]
            return _OPAQUE if any(part is _OPAQUE for part in marks) else (len(one), marks)
        if _is_own(one):
            marked = ((key, mark(part, depth - 1)) for key, part in vars(one).items() if _lasts(part))
            return [(key, found) for key, found in marked if found is not _OPAQUE]
        return _rebound(one) if isinstance(one, VALUES) else _OPAQUE

    parts = {name: value} if isinstance(value, CONTAINERS) else {}
    if _is_own(value):
        parts = {f"{name}.{key}": part for key, part in vars(value).items() if _lasts(part)}
    found = {key: mark(part, DEPTH) for key, part in parts.items()}
    return {key: one for key, one in found.items() if one is not _OPAQUE}


def _lasts(value: object) -> bool:
    """Whether an attribute that changes is more than a note of the last iteration's result."""
    return (type(value) is int or isinstance(value, (*CONTAINERS, *GENERATORS)) or _is_own(value)) and not (
        isinstance(value, OTHERS_AFFAIR)
    )


@cache
def _is_scripts_class(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_main = kind.__module__ == "__main__"
    return is_main or (
        file is not None and not file.startswith(_LIBRARIES) and "jitckpt" not in kind.__module__
    )


def _is_own(value: object) -> bool:
    kind: Any = type(value)
    own = _is_scripts_class(kind) and not isinstance(value, OTHERS_AFFAIR)
    return own and isinstance(getattr(value, "__dict__", None), dict)


def _state_of(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = (
        generator.bit_generator.state
        if isinstance(generator, numpy.random.Generator)
        else generator.get_state()
    )
    return repr(state)


def _kept_by(extra: Any) -> tuple[set[str], set[int]]:
    """Return names of variables that the state_dict of `extra` reads, and the ids of what it has inside."""
    names: set[str] = set()
    ids: set[int] = set()
    waiting: list[tuple[Any, int]] = [(extra, DEPTH + 1)] if extra is not None else []
    method = getattr(type(extra), "state_dict", None)
    function: Any = inspect.unwrap(method) if method is not None else None
    if (code := getattr(function, "__code__", None)) is not None:
        names = {*code.co_names, *code.co_freevars}
        scope = inspect.getclosurevars(function)
        waiting += [(one, DEPTH) for one in (*scope.globals.values(), *scope.nonlocals.values())]
    while waiting:
        one, depth = waiting.pop()
        if depth and id(one) not in ids and not isinstance(one, type):
            ids.add(id(one))
            waiting += [(part, depth - 1) for part in _parts(one)]
    return names, ids


def _parts(one: object) -> Iterator[object]:
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | deque) and len(one) < MOST_VALUES:
        yield from one
    yield from (getattr(one, "__dict__", None) or {}).values()
