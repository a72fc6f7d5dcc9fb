"""Calls of the C library for which Python has no functions."""

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_SYNC_FILE_RANGE_WRITE = 2
_PR_SET_CHILD_SUBREAPER = 36
_TIMEX_BYTES = 512  # larger than struct timex; all zero: ask, change nothing
_TIME_ERROR = 5  # of <sys/timex.h>: the clock is not synchronised

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def rename(one: Path, other: Path, flag: int) -> int:
    """Rename with one of the flags above (renameat2(2)); return the errno, 0 for success."""
    ctypes.set_errno(0)
    done = _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flag)
    return 0 if done == 0 else ctypes.get_errno()


def begin_sync(descriptor: int, begin: int, size: int) -> None:
    """Have a part of a file written to the disk soon; whether it can be is not told (sync_file_range(2))."""
    _libc.sync_file_range(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)


def adopt_orphans() -> int:
    """Have processes whose parents end become this process's children (prctl(2)); return the errno or 0."""
    return 0 if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0 else ctypes.get_errno()


def clock_is_synchronised() -> bool | None:
    """Ask the kernel; None if it does not say (ntp_adjtime(3))."""
    state: int = _libc.ntp_adjtime(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _TIME_ERROR
