"""What jitckpt itself says to the user, beside what the workers print."""

import os
import sys


def say(text: str) -> None:
    """Print a line on stderr. Where nobody reads it any more (a closed terminal), go on without."""
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
