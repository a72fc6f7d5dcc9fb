"""What a file system does in one moment, and what brings folders to the disk."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from jitckpt.bindings import libc

# So says a file system (NFS, some of FUSE) or a kernel that can't do it.
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_HAS_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one moment; return whether this file system can. Raises OSError."""
    return _rename(one, other, libc.RENAME_EXCHANGE)


def put_where_nothing_is(fresh: Path, path: Path) -> None:
    """Give a file a name that nothing has yet, in one moment. Raises FileExistsError, OSError."""
    try:
        os.link(fresh, path)
        fresh.unlink()
    except OSError as error:
        if error.errno not in _HAS_NO_LINKS:
            raise
        if not _rename(fresh, path, libc.RENAME_NOREPLACE):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
            fresh.rename(path)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk, where the file system has a way to. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder, with those above it, so that it is there after a power failure, too. Raises OSError."""
    made = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        made.append(folder)
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        with suppress(PermissionError):  # a folder that only lets others pass
            sync_folder(folder.parent)


def _rename(one: Path, other: Path, flag: int) -> bool:
    number = libc.rename(one, other, flag)
    if number == 0:
        return True
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
