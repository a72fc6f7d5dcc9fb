"""A pass over a loader in a loop of the script's own, whose counts beside the batches go on as well."""

import dis
import gc
import inspect
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from jitckpt.bindings.enumerated import count_of, set_count
from jitckpt.data import progress_bars
from jitckpt.data.loop import Iteration
from jitckpt.frameworks import protection
from jitckpt.worker import carried_names, frames
from jitckpt.worker.job import Job

LOADERS = "deepspeed.runtime."  # modules with such around torch's
COUNTS = frozenset({"range", "count", "islice"})
COUNTED = (
    "{function}() beside the batches of a loader counts from 0 again where a restart goes on in the middle "
    "of an epoch, which then has other steps. Write `for number, batch in enumerate(loader):`, and leave the "
    "loop by `break`."
)


class ScriptPass(Iteration):
    """One pass.

    An `enumerate` around it counts the batches from before the failure, too. What the loop sets and the code
    behind it reads is kept: a restart at an epoch's end comes there without batches.
    """

    def __init__(self, job: Job, loader: Iterable[Any], frame: FrameType) -> None:
        """frame: it iterates the loader."""
        super().__init__(job.loop, loader)
        self._job, self._given = job, 0
        state = self.begun.state
        self._done = 0 if state.ended else state.batches
        if function := counts_beside(frame):
            protection.tell(COUNTED.format(function=function))

    def __next__(self) -> Any:
        if self._done:
            for one in _enumerates(self, sys._getframe(1)):
                set_count(one, count_of(one) + self._done)
            self._done = 0
        if self._given == 1:
            self._job.keep_what_is_read_behind(sys._getframe(1))
        self._given += 1
        return super().__next__()


def _enumerates(iteration: ScriptPass, frame: FrameType) -> list["enumerate[Any]"]:
    """Return those that count a pass which this frame asks for a batch.

    Also around progress bars, and loaders of the framework's that have torch's inside.
    """
    givers: list[FrameType] = []
    asks: FrameType | None = frame
    while asks is not None and _gives_what_it_gets(asks):
        givers.append(asks)
        asks = asks.f_back
    iterators = [iteration, *(one for giver in givers if (one := _iterator_of(giver)) is not None)]
    return [
        one
        for one in gc.get_objects()
        # What one has not got yet, as it is being made, is not among its referents.
        if type(one) is enumerate
        and any(_gives_batches_of(iterator, iterators, givers) for iterator in gc.get_referents(one))
    ]


def _gives_what_it_gets(frame: FrameType) -> bool:
    return progress_bars.is_in_one(frame) or frame.f_globals.get("__name__", "").startswith(LOADERS)


def _iterator_of(frame: FrameType) -> object:
    """Return the object whose next value is asked for in this frame."""
    return frames.variables_of(frame).get("self") if frame.f_code.co_name == "__next__" else None


def _gives_batches_of(iterator: object, iterators: Sequence[object], givers: Sequence[FrameType]) -> bool:
    """Whether it gives one value for each batch. Of several loaders in a zip or map the first one tells."""
    while isinstance(iterator, zip | map):
        of_map = isinstance(iterator, map)
        iterator = iterator.__reduce__()[1][1 if of_map else 0]
    if inspect.isgenerator(iterator):
        return any(iterator.gi_frame is giver for giver in givers)
    return any(iterator is one for one in iterators)


def counts_beside(frame: FrameType) -> str:
    """Return which function that can't go on counts the batches that this frame iterates; "" for none."""
    instruction = next(
        (one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti), None
    )
    if instruction is None or not instruction.opname.startswith("CALL"):
        return ""
    names = carried_names.names_in(frame.f_code, instruction)
    if "filter" in names and "enumerate" in frame.f_code.co_names:
        return "enumerate"  # of what filter leaves, which is fewer than the batches
    return min(COUNTS & names, default="")
