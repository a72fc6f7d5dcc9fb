"""The launcher's folder for temporary files; it goes with the launcher, or with its guardian.

Where both were killed, as a scheduler may do, with the next launcher. Who lives holds a lock.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jitckpt.system.empty_folder import remove_if_empty
from jitckpt.system.left_folders import OPEN, hold, left_folders

PREFIX = "jitckpt-launcher-"


@contextmanager
def launcher_folder() -> Iterator[Path]:
    """Give a folder that is this user's alone, and goes in the end if no file is in it. Raises OSError."""
    _remove_what_others_left()
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    descriptor = os.open(hidden, OPEN)
    try:
        hold(descriptor)  # before it has the name by which others would find it
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        try:
            yield folder
        finally:
            remove_if_empty(folder)
    finally:
        os.close(descriptor)


def _remove_what_others_left() -> None:
    for path in left_folders(Path(tempfile.gettempdir()), PREFIX):
        with suppress(OSError):  # something was put there just now, and it stays
            remove_if_empty(path)
