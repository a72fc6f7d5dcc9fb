"""Outputs of this process that are pipes of another user's, as those of a container's processes may be.

Who made a pipe may open it anew, as CRIU does for processes that it restores. Nobody else may, unless root.
"""

import contextlib
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator

INPUT, OUTPUT, ERROR = range(3)
_FIRST_FREE = 3  # descriptors: after the standard ones
_LAST_SECONDS = 10.0  # for what was said last, if somebody has the pipe still


def is_closed_to_us(number: int) -> bool:
    """Return whether a descriptor of this process is a pipe that it may not open anew."""
    try:
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return False
        flags = os.O_RDONLY if number == INPUT else os.O_WRONLY
        os.close(os.open(f"/proc/self/fd/{number}", flags | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return True
    except OSError:  # nobody reads it any more
        return False
    return False


@contextlib.contextmanager
def outputs_of_own(wanted: bool) -> Iterator[None]:
    """Have pipes of this user's in place of such outputs. Another program passes on what is said there."""
    with contextlib.ExitStack() as stack:
        closed = [number for number in (OUTPUT, ERROR) if wanted and is_closed_to_us(number)]
        if len(closed) > 1 and _identity(OUTPUT) == _identity(ERROR):
            stack.enter_context(_passed_on(closed))
        else:
            for number in closed:
                stack.enter_context(_passed_on([number]))
        yield


@contextlib.contextmanager
def _passed_on(numbers: list[int]) -> Iterator[None]:
    """numbers: of descriptors of one pipe, which share the new one, too, so that lines keep their order."""
    before = fcntl.fcntl(numbers[0], fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    read, write = os.pipe()
    # It ends when nobody has the pipe any more, also where this process is killed; Ctrl-C is not for it. In
    # another session it would be taken for a worker's.
    other = subprocess.Popen(["cat"], stdin=read, stdout=before, stderr=subprocess.DEVNULL, process_group=0)
    os.close(read)
    for number in numbers:
        os.dup2(write, number)
    os.close(write)
    try:
        yield
    finally:
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        for number in numbers:
            os.dup2(before, number)
        os.close(before)
        with contextlib.suppress(subprocess.TimeoutExpired):
            other.wait(_LAST_SECONDS)


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino
