"""Removes folders that hold nothing; apart, since the guardian loads it in milliseconds."""

import contextlib
import os
from pathlib import Path


def remove_if_empty(folder: str | Path) -> None:
    """Remove a folder with the folders in it, unless there is a file anywhere."""
    if not any(files for _, _, files in os.walk(folder)):
        for path, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(FileNotFoundError):  # another may clean up, too
                os.rmdir(path)
