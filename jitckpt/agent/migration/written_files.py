"""Files that a rank writes on its host's own disk go to the next host with it, or its log would end there."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from typing import BinaryIO

from jitckpt.bindings.criu import CriuError
from jitckpt.console import say, show_size
from jitckpt.wire.moves import WRITTEN, WrittenFile

_PIECE = 1 << 20  # bytes


def put_written_files(files: Sequence[WrittenFile], images: int, undo: contextlib.ExitStack) -> None:
    """Put files, which have come beside the images, where they were on the other host.

    What is there may be the beginning of it, as where a rank comes back to a host, or all of it. Raises
    CriuError if it is something else, OSError. undo: is told how this host was before.
    """
    for number, file in enumerate(files):
        source = os.open(f"{WRITTEN}{number}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=images)
        with open(source, "rb") as content:
            _put(file, content, undo)


def _put(file: WrittenFile, content: BinaryIO, undo: contextlib.ExitStack) -> None:
    os.makedirs(os.path.dirname(file.path), exist_ok=True)
    try:
        there = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file.mode)
    except FileExistsError:
        there = os.open(file.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        before = os.fstat(there).st_size
    else:
        before = 0
        undo.callback(os.unlink, file.path)
        os.fchmod(there, file.mode)
        os.chown(there, file.user, file.group)
    with open(there, "r+b") as target:
        if not _begins_with(content, target, before):
            raise CriuError(f"A rank writes {file.path}, and here that is another file.")
        size = os.fstat(content.fileno()).st_size
        if before < size:
            undo.callback(_shorten, file.path, before)
            content.seek(before)
            target.seek(before)
            shutil.copyfileobj(content, target, _PIECE)
            say(f"{file.path} has come, too ({show_size(size - before)}).")


def _begins_with(content: BinaryIO, beginning: BinaryIO, size: int) -> bool:
    while size:
        piece = beginning.read(min(size, _PIECE))
        if not piece or content.read(len(piece)) != piece:
            return False
        size -= len(piece)
    return True


def _shorten(path: str, size: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # it was made here, and is gone by now
        os.truncate(path, size)
