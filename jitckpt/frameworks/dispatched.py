"""A pass over Accelerate's loader that one process reads for all, as of a stream: it is read again."""

from collections.abc import Iterator
from typing import Any

from jitckpt.data.data_pass import OtherPass
from jitckpt.frameworks import read_ahead


def fits(loader: Any) -> bool:
    """Return whether it is such a loader."""
    return type(loader).__name__ == "DataLoaderDispatcher" and hasattr(loader, "base_dataloader")


class Pass(OtherPass):
    """One pass."""

    def _iterate(self) -> Iterator[Any]:
        return read_ahead.iterated(self._of.loader)
