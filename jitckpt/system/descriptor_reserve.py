"""Descriptors that are set aside for what must be written when a process has no other left."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

WIDTH = 6  # a file, its folder, the parent's, and those that other threads may take at that moment

_kept: list[int] = []
_wanted = [0]
_lock = threading.Lock()


def fill() -> None:
    """Set them aside from now on, as many as there are."""
    _wanted[0] = WIDTH
    _fill()


def _fill() -> None:
    with _lock, suppress(OSError):
        while len(_kept) < _wanted[0]:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


@contextmanager
def lent() -> Iterator[None]:
    """Let those that are set aside be taken by what is done here; they are set aside again afterwards."""
    with _lock:
        while _kept:
            os.close(_kept.pop())
    try:
        yield
    finally:
        _fill()
