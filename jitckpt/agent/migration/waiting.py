"""By which `jitckpt migrate` sees who waits for a job's parts (`jitckpt resume --wait`): new files."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "waiting-"
FRESH_SECONDS = 15.0  # that a word of somebody who waits lasts; file systems of several hosts may be late


def note(directory: Path, place: int) -> None:
    """Say once more that this process waits for the part of that host."""
    with suppress(OSError):
        (directory / f"{PREFIX}{place}.json").write_text(json.dumps({"host": socket.gethostname()}))


@contextmanager
def seen(directory: Path, place: int) -> Iterator[None]:
    """Be seen, as far as `note` is called now and then."""
    note(directory, place)
    try:
        yield
    finally:
        (directory / f"{PREFIX}{place}.json").unlink(missing_ok=True)


def who(directory: Path) -> dict[int, str]:
    """Return on which host somebody waits, by the places of the parts. Raises OSError."""
    probe = directory / f".{PREFIX}{os.getpid()}-{socket.gethostname()}"
    probe.touch()  # by the clock of the file system
    now = probe.stat().st_mtime
    probe.unlink()
    found = {}
    for path in directory.glob(f"{PREFIX}*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if now - path.stat().st_mtime < FRESH_SECONDS:
                found[int(path.stem.removeprefix(PREFIX))] = str(json.loads(path.read_text())["host"])
    return found
