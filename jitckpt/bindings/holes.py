"""Gives parts of a file back to its file system; the rest stays where it is."""

import ctypes
import os

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


def punch(file: int, at: int, size: int) -> None:
    """Have bytes take no room any more; they read as zeros. Raises OSError where that can't be done."""
    offset, length = ctypes.c_int64(at), ctypes.c_int64(size)
    if _libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
