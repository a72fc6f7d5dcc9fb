"""A pass over Accelerate's loader that one process reads for all, as of a stream: it is read again."""

from collections.abc import Iterator
from typing import Any

from jitckpt.data.data_pass import Loader, OtherPass, PassState
from jitckpt.frameworks import read_ahead


def fits(loader: Any) -> bool:
    """Return whether it is such a loader."""
    return type(loader).__name__ == "DataLoaderDispatcher" and hasattr(loader, "base_dataloader")


def begin(of: Loader, saved: PassState | None) -> "DispatchedPass":
    one = DispatchedPass(of, saved)
    if saved is not None and saved.ended and not saved.begun:
        of.loader.iteration += 1  # type: ignore[attr-defined]  # as its own end does, which is not read to
    return one


class DispatchedPass(OtherPass):
    """One pass."""

    def _iterate(self) -> Iterator[Any]:
        return read_ahead.iterated(self._of.loader)
