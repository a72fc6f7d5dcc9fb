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
from jitckpt.data.loop import Iteration, Loop
from jitckpt.frameworks import protection
from jitckpt.worker import carried_names

COUNTS = frozenset({"range", "count", "islice"})
COUNTED = (
    "{function}() beside the batches of a loader counts from 0 again where a restart goes on in the middle "
    "of an epoch, which then has other steps. Write `for number, batch in enumerate(loader):`, and leave the "
    "loop by `break`."
)


class ScriptPass(Iteration):
    """One pass. An `enumerate` around it counts the batches from before the failure, too."""

    def __init__(self, loop: Loop, loader: Iterable[Any], frame: FrameType) -> None:
        """frame: it iterates the loader."""
        super().__init__(loop, loader)
        state = self.begun.state
        self._done = 0 if state.ended else state.batches
        if function := counts_beside(frame):
            protection.tell(COUNTED.format(function=function))

    def __next__(self) -> Any:
        if self._done:
            for one in _enumerates(self, sys._getframe(1)):
                set_count(one, count_of(one) + self._done)
            self._done = 0
        return super().__next__()


def _enumerates(iteration: ScriptPass, frame: FrameType) -> list["enumerate[Any]"]:
    """Return those that count a pass which this frame asks for a batch, also around a progress bar."""
    bars: list[FrameType] = []
    asks: FrameType | None = frame
    while asks is not None and progress_bars.is_in_one(asks):
        bars.append(asks)
        asks = asks.f_back
    return [
        one
        for one in gc.get_objects()
        # What one has not got yet, as it is being made, is not among its referents.
        if type(one) is enumerate
        and any(_gives_batches_of(iterator, iteration, bars) for iterator in gc.get_referents(one))
    ]


def _gives_batches_of(iterator: object, iteration: ScriptPass, bars: Sequence[FrameType]) -> bool:
    """Whether it gives one value for each batch. Of several loaders in a zip the first one tells."""
    while type(iterator) is zip:
        iterator = iterator.__reduce__()[1][0]
    if inspect.isgenerator(iterator):
        return any(iterator.gi_frame is bar for bar in bars)
    return iterator is iteration


def counts_beside(frame: FrameType) -> str:
    """Return which function that can't go on counts the batches that this frame iterates; "" for none."""
    instruction = next(
        (one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti), None
    )
    if instruction is None or not instruction.opname.startswith("CALL"):
        return ""
    return min(COUNTS & carried_names.names_in(frame.f_code, instruction), default="")
