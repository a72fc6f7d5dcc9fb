"""A program among processes of its own, whose numbers are free there though others have them here.

In a PID namespace and a mount namespace, which has a /proc of it. It is the first there, ends with this
process, and is sent the signals that this one gets.
"""

import contextlib
import ctypes
import os
import signal
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000  # linux/sched.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18  # linux/mount.h
_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NOT_BEGUN = 126  # exit status of a shell for a program that can't be run
_libc = ctypes.CDLL(None, use_errno=True)


def run(command: Sequence[str], environment: Mapping[str, str], first: int) -> int:
    """Run a command there to its end; return its status. first: from where numbers are given.

    Raises OSError if there can be no such namespaces.
    """
    _call(_libc.unshare, _CLONE_NEWPID | _CLONE_NEWNS)
    ours, theirs = os.pipe()  # by which it sees that this process has ended meanwhile
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(theirs)
            _begin(command, environment, first, ours)
        os._exit(_NOT_BEGUN)
    os.close(ours)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        return _status(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        os.close(theirs)
        for number, handler in before.items():
            signal.signal(number, handler)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _begin(command: Sequence[str], environment: Mapping[str, str], first: int, alive: int) -> None:
    os.setsid()  # what a terminal sends to all of its group comes by the other process alone
    _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_blocking(alive, False)
    with contextlib.suppress(BlockingIOError):
        if not os.read(alive, 1):
            return
    os.close(alive)
    _call(_libc.mount, None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call(_libc.mount, b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(first))
    for number in range(3):
        _open_here(number)
    os.execve(command[0], list(command), dict(environment))


def _open_here(number: int) -> None:
    """Open a file anew that was opened by a mount of the other namespace, which CRIU would not find."""
    status = os.fstat(number)
    path = os.readlink(f"/proc/self/fd/{number}")
    if not path.startswith("/") or not (stat.S_ISREG(status.st_mode) or path == os.devnull):
        return
    told = Path(f"/proc/self/fdinfo/{number}").read_text().split()
    flags = int(told[told.index("flags:") + 1], 8) & (os.O_ACCMODE | os.O_APPEND)
    file = os.open(path, flags)
    if stat.S_ISREG(status.st_mode):
        os.lseek(file, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(file, number)
    os.close(file)


def _call(function: object, *arguments: object) -> None:
    if function(*arguments) != 0:  # type: ignore[operator]
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
