"""A folder in memory without a name: it goes with the last process that has it open, however that ends."""

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator

# fsopen(2) and its like, which only newer libcs have: the same numbers on all architectures.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def nameless_folder() -> Iterator[int]:
    """Give a descriptor of a new, empty folder.

    Who may not mount gets one in /dev/shm, which stays if this process is killed. Raises OSError.
    """
    named = None
    try:
        folder = _mounted()
    except PermissionError:
        named = tempfile.mkdtemp(prefix="jitckpt-images-", dir="/dev/shm")
        folder = os.open(named, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)
        if named is not None:
            shutil.rmtree(named)


def _mounted() -> int:
    """Return a file system's root that is mounted nowhere. Raises OSError."""
    kind = _call(_FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC)
    try:
        _call(_FSCONFIG, kind, _FSCONFIG_CMD_CREATE, None, None, 0)
        mount = _call(_FSMOUNT, kind, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(kind)
    try:
        root = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fchmod(root, 0o700)
        return root
    finally:
        os.close(mount)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
