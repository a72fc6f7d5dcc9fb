"""Counts beside a loop's batches: an `enumerate` around a pass that goes on counts those from before, too."""

import gc
import inspect
from collections.abc import Sequence
from types import FrameType
from typing import Any

from jitckpt.bindings.enumerated import count_of, set_count
from jitckpt.data import progress_bars
from jitckpt.system import living

LOADERS = "deepspeed.runtime."  # modules with such around torch's


def go_on(iteration: object, frame: FrameType, done: int) -> None:
    """Have each one that counts this iteration, which a frame asks for a batch, count so many more."""
    for one in _enumerates(iteration, frame):
        set_count(one, count_of(one) + done)


def _enumerates(iteration: object, frame: FrameType) -> list["enumerate[Any]"]:
    """Return those that count a pass which this frame asks for a batch.

    Also around progress bars, and loaders of a framework's that have torch's inside.
    """
    givers: list[FrameType] = []
    asks: FrameType | None = frame
    while asks is not None and _gives_what_it_gets(asks):
        givers.append(asks)
        asks = asks.f_back
    iterators = [iteration, *(one for giver in givers if (one := _iterator_of(giver)) is not None)]
    return [
        one
        for one in living.objects_of([enumerate])
        # What one has not got yet, as it is being made, is not among its referents.
        if any(_gives_batches_of(iterator, iterators, givers) for iterator in gc.get_referents(one))
    ]


def _gives_what_it_gets(frame: FrameType) -> bool:
    return progress_bars.is_in_one(frame) or frame.f_globals.get("__name__", "").startswith(LOADERS)


def _iterator_of(frame: FrameType) -> object:
    """Return the object whose next value is asked for in this frame."""
    return frame.f_locals.get("self") if frame.f_code.co_name == "__next__" else None


def _gives_batches_of(iterator: object, iterators: Sequence[object], givers: Sequence[FrameType]) -> bool:
    """Whether it gives one value for each batch. Of several loaders in a zip or map the first one tells."""
    while isinstance(iterator, zip | map):
        of_map = isinstance(iterator, map)
        iterator = iterator.__reduce__()[1][1 if of_map else 0]
    if inspect.isgenerator(iterator):
        return any(iterator.gi_frame is giver for giver in givers)
    return any(iterator is one for one in iterators)
