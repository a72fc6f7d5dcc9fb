"""What jitckpt itself says to the user, beside what the workers print."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from jitckpt.system.disk_thread import DiskThread

LAST_SECONDS = 2.0  # that the end waits for what is still to be said

_aside: DiskThread | None = None


@contextmanager
def said_aside() -> Iterator[None]:
    """Let `say` wait for nobody: stderr may be a file on a blocked file system, or a pipe that is full."""
    global _aside  # noqa: PLW0603
    thread = _aside = DiskThread("jitckpt-says")
    try:
        yield
    finally:
        _aside = None
        thread.finish(LAST_SECONDS)


def say(text: str) -> None:
    """Print a line on stderr. Where nobody reads it any more (a closed terminal), go on without."""
    if _aside is None:
        _print(text)
    else:
        _aside.do(partial(_print, text))


def _print(text: str) -> None:
    try:
        # With its end in one piece: unbuffered, another process's line might come between.
        print(f"jitckpt: {text}\n", end="", file=sys.stderr, flush=True)
    except OSError:
        # A recovery must not fail because of it, nor the exit of the process, which flushes stderr.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def show_size(size: int) -> str:
    """Return a size in bytes for people to read, in decimal units."""
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
