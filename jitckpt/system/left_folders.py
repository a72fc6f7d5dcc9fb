"""Folders whose owner holds a lock on them for as long as it lives: those whose owner was killed can go."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# What a file system says that has no locks, such as NFS without a lock server.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def hold(descriptor: int) -> None:
    """Hold the lock on a folder of this process's own. Without locks it stays there if this one is killed.

    Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def left_folders(within: Path, prefix: str) -> Iterator[Path]:
    """Yield this user's folders there whose lock nobody holds; it is held until the next is asked for."""
    for path in sorted(within.glob(f"{prefix}*")):
        try:
            descriptor = os.open(path, OPEN)
        except OSError:  # another user's, or gone by now
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _is_left(descriptor):
                yield path
        finally:
            os.close(descriptor)


def _is_left(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives; where there are no locks, it may
        return False
    return True
