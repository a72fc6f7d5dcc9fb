"""The script's own loop over epochs, `for epoch in range(n):`, in which a restart goes on as in `job.epochs`.

From the moment at which a training can begin until its first pass over a loader begins, `range` in the
script's modules is ours. The outermost `for` statement over one in which that pass begins is the loop over
epochs: from there on the job counts it. A restart finds the same statement again, and begins it with the
epoch in which the job is. Of other loops nothing is known: there the script goes through the epochs that are
done once more.
"""

import builtins
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from jitckpt.data import generators
from jitckpt.errors import CheckpointError
from jitckpt.frameworks import notes, protection
from jitckpt.frameworks.protection import FrameworkProtection
from jitckpt.system.bytecode import instructions as instructions_of
from jitckpt.system.bytecode import place_in
from jitckpt.worker import agreements, carried_names, directory, frames

FILE = "script_epochs.json"
MOST_BEGUN = 8  # at one place, before the training: a loop in another one, or in what is called often
BARS = frozenset({"tqdm", "track"})  # they give what they get
ANOTHER_LOOP = (
    "The save is of epoch {epoch} of the script's loop over epochs, and this start has not come to that "
    "loop: it is not where it was as the job began. Start the script as it was, or choose another checkpoint "
    "directory."
)

GONE_THROUGH = (
    "The loop around the script's loop over batches is no `for` statement over range() that a restart could "
    "begin later: it goes through the epochs that are done once more, without batches. What is behind their "
    "batches is done again, with the newest parameters: it may decide otherwise (an early stop), and what "
    "the loop over batches alone sets has no value there. Write `for epoch in range(n):`."
)

_Begin = Callable[[FrameType], FrameworkProtection | None]

_begin: _Begin | None = None  # while we wait for the loop
_watched: list[dict[str, Any]] = []  # the variables of modules in which range is ours
_running: list["ScriptEpochs"] = []  # loops that may be the one over epochs, from the outermost on
_found: "ScriptEpochs | None" = None
_known_place: list[Any] = []  # where the start before had found it; one thing, once all ranks have said it
_begun: "Counter[tuple[CodeType, int]]" = Counter()  # loops, by their places
_until_trained: RemovableHandle | None = None


class _IsRange(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.range)


class Range(metaclass=_IsRange):
    """In the place of `range`."""

    def __new__(cls, *given: Any) -> Any:
        numbers = builtins.range(*given)
        if protection.is_taken():
            end()
        frame = sys._getframe(1)
        place = frame.f_code, place_in(frame)
        if (
            _begin is None
            or not numbers
            or _begun[place] == MOST_BEGUN
            or (asks := loop_over(*place)) is None
        ):
            return numbers
        _begun[place] += 1
        return ScriptEpochs(numbers, frame, asks)


class ScriptEpochs:
    """A range that may be that of the epochs."""

    def __init__(self, numbers: range, frame: FrameType, asks: int) -> None:
        """frame: it has the loop. asks: where in its code the loop asks for the next number."""
        self._numbers, self._asks = numbers, asks
        self._frame: FrameType | None = frame
        self._place = [frame.f_globals.get("__name__"), frame.f_code.co_qualname, place_in(frame)]
        self._drawn_from = b""  # all generators, packed, as the first epoch began
        self.is_in_first = False
        self._epochs: Iterator[int] | None = None  # the job's

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        if _begin is not None and self._frame is not None and [self._place] == _known_place:
            begin, frame = _begin, self._frame
            if (training := begin(frame)) is not None:
                self._is_found()
                self._note_place(training)  # a host that came in another's place has no note
                self._epochs = training.job.loop.epochs(len(self), frame)
        if self._epochs is None:
            yield from self._until_found()
        self._frame = None  # else it keeps itself alive
        yield from (self._numbers[number] for number in self._epochs or ())

    def _until_found(self) -> Iterator[int]:
        self._drawn_from = generators.all_packed()
        _running.append(self)
        try:
            for number in self._numbers:
                self.is_in_first = number == self._numbers[0]
                yield number
                if self._epochs is not None:
                    return
        finally:
            _running.remove(self)

    def found(self, training: FrameworkProtection) -> None:
        """The training begins in its first epoch."""
        self._is_found()
        job = training.job
        assert self._frame is not None
        self._epochs = job.loop.epochs(len(self), self._frame)
        next(self._epochs)
        job.loop.epoch_began_with(self._drawn_from)
        job.look_at_epochs(self._frame, self._asks)
        self._note_place(training)

    def _note_place(self, training: FrameworkProtection) -> None:
        """Note where the loop is, on each host: any may be lost, and directories are often their own."""
        file = training.job.root / FILE
        if os.environ.get("LOCAL_RANK", "0") == "0" and notes.read(file) != self._place:
            notes.write(file, self._place)

    def _is_found(self) -> None:
        global _found  # noqa: PLW0603
        _found = self


def watch(frame: FrameType, begin: _Begin) -> None:
    """A training can begin from here on. begin: protects it as a restart comes to its loop over epochs."""
    global _begin, _until_trained  # noqa: PLW0603
    if _found is not None or protection.is_taken():
        return
    _begin = begin
    if not _known_place:
        said = agreements.all_say(notes.read(directory.root_of(None) / FILE))
        _known_place.append(next((place for place in said if place is not None), None))
    if _until_trained is None:
        _until_trained = register_module_forward_pre_hook(_trains)
    modules = [sys.modules["__main__"].__dict__, *(one.f_globals for one in frames.scripts_frames(frame))]
    for variables in modules:
        if "range" not in variables:
            variables["range"] = Range
            _watched.append(variables)


def _trains(module: nn.Module, given: object) -> None:
    """A model is called: what torch compiles of it is to have Python's range."""
    if module.training and torch.is_grad_enabled():
        end()


def may_be_found() -> bool:
    """Whether the script is in the first round of what may be its loop over epochs, or in the one that is."""
    return _found is not None or bool(_running and _running[0].is_in_first)


def training_begins(training: FrameworkProtection | None, frame: FrameType) -> None:
    """The first pass over a loader of the training begins, from this frame; training: None: unprotected."""
    end()
    if training is None:
        return
    if training.restored > 0 and training.job.loop.epoch > 0:
        raise CheckpointError(ANOTHER_LOOP.format(epoch=training.job.loop.epoch))
    if training.restored == 0 and may_be_found():
        _running[0].found(training)
    elif any(
        carried_names.loops_around(one.f_code, (place_in(one),)) for one in frames.scripts_frames(frame)
    ):
        protection.tell(GONE_THROUGH)


def end() -> None:
    """Let range be Python's again."""
    global _begin, _until_trained  # noqa: PLW0603
    _begin = None
    _begun.clear()
    if _until_trained is not None:
        _until_trained.remove()
        _until_trained = None
    while _watched:
        variables = _watched.pop()
        if variables.get("range") is Range:
            del variables["range"]


@cache
def loop_over(code: CodeType, at: int) -> int | None:
    """Return where the for statement asks that iterates what a call at this place returns, also in a bar."""
    instructions = instructions_of(code)
    behind = [one for one in instructions if one.offset > at]
    inside = [*takewhile(lambda one: one.opname != "GET_ITER", behind)]
    following = behind[len(inside) + 1 : len(inside) + 2]
    if not following or following[0].opname != "FOR_ITER":
        return None
    calls = [one for one in inside if one.opname.startswith("CALL")]
    is_one_expression = not any("STORE" in one.opname or "JUMP" in one.opname for one in inside)
    is_bars = len(calls) == 1 and bool(BARS & carried_names.names_in(code, calls[0]))
    return following[0].offset if is_one_expression and (is_bars or not inside) else None
