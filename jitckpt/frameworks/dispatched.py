"""A pass over Accelerate's loader that one process reads for all, as of a stream: it is read again."""

from collections.abc import Iterator
from typing import Any

from jitckpt.data.data_pass import Loader, OtherPass, PassState
from jitckpt.frameworks import read_ahead


def fits(loader: Any) -> bool:
    """Return whether it is such a loader."""
    return type(loader).__name__ == "DataLoaderDispatcher" and hasattr(loader, "base_dataloader")


def begin(of: Loader, saved: PassState | None) -> "DispatchedPass":
    loader: Any = of.loader
    if saved is not None:
        loader.iteration = saved.number
    number = loader.iteration
    one = DispatchedPass(of, saved)
    one.state.number = number
    if saved is not None and saved.ended and not saved.begun:
        loader.iteration += 1  # as its own end does, which is not read to
    return one


class DispatchedPass(OtherPass):
    """One pass."""

    def _iterate(self) -> Iterator[Any]:
        return read_ahead.iterated(self._of.loader)
