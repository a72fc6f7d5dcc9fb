"""Sees when a program iterates a torch DataLoader by itself."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


def watch(iterated: Callable[[DataLoader[Any], Iterator[Any]], None]) -> Callable[[], None]:
    """Call `iterated` with each loader whose iterator is made, and that; returns what ends it."""
    plain = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Any:
        iterator = plain(loader)
        iterated(loader, iterator)
        return iterator

    def end() -> None:
        if DataLoader.__iter__ is iterate:  # else somebody has wrapped it since
            DataLoader.__iter__ = plain  # type: ignore[method-assign]

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    return end
