"""Files that are opened by name, where anything may lie: who opens a named pipe would wait for ever."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NO_FILE = "it is no file"


class NoFileError(OSError):
    """By that name there is a pipe, a socket, a device or a folder."""


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Return a descriptor of the file, without ever waiting for who is at the other end of a pipe.

    Raises NoFileError where it is none, and OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe that nobody reads, a socket; a folder
            raise NoFileError(errno.EINVAL, NO_FILE, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoFileError(errno.EINVAL, NO_FILE, str(path))
    return descriptor


def reading(path: Path | str, flags: int = 0) -> BinaryIO:
    """Return the file, opened to be read, without a buffer of its own. Raises as open_regular does."""
    return open(open_regular(path, os.O_RDONLY | flags), "rb", buffering=0)


def content_of(path: Path | str) -> bytes:
    """Return what a file holds. Raises as open_regular does."""
    with reading(path) as file:
        return file.read()


def text_of(path: Path | str) -> str:
    """Return the text that a file holds. Raises as open_regular does, and UnicodeError."""
    return content_of(path).decode()
