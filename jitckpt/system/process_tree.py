"""The processes of a job, found wherever they have gone: by a mark in their environment, sessions, ancestors.

A worker's children may lead sessions of their own, and a daemon's parent has ended. Only what is told here
from /proc is taken for the job's, and looked at again before it is ended.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from jitckpt.wire.environment import JOB_PROCESSES

MARK = JOB_PROCESSES.name  # in the environment of all that an agent starts for its job
# What cleans up in /dev/shm behind processes that were killed, and ends by itself then.
TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
LOOK_SECONDS = 0.01
TIDYING_SECONDS = 5.0  # what tidiers get: torch's looks for 2 s whether somebody comes, and then clears
STUCK_SECONDS = 5.0  # without any of the processor's time: it waits for what may never come
ENDING_SECONDS = 10.0  # a killed process that has not ended by then is stuck in its driver or file system


@dataclass(frozen=True)
class Process:
    """A process as /proc/PID/stat had it.

    dead: a zombie, of which its parent has not taken note yet. stopped: by a signal such as SIGSTOP. ticks:
    of the processor's time that it has had.
    """

    pid: int
    parent: int
    session: int
    dead: bool
    stopped: bool = False
    ticks: int = 0


def look(pid: int) -> Process | None:
    """Return the process of this number; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, _, session, *more = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = int(more[7]) + int(more[8])
    return Process(pid, int(parent), int(session), state in (b"Z", b"X"), state in (b"T", b"t"), ticks)


class Patience:
    """Waits for what a process is to do, as long as it may still do it."""

    def __init__(self, pid: int, seconds: float) -> None:
        """seconds: at most."""
        self._pid = pid
        self._until = time.monotonic() + seconds
        self._ticks, self._since = -1, 0.0

    def lost(self) -> str | None:
        """Return why it is of no use to wait longer, as the end of a sentence; None if it may be."""
        now, process = time.monotonic(), look(self._pid)
        if process is None or process.dead:
            return "has ended"
        if process.stopped:
            return "is stopped by a signal"
        if process.ticks != self._ticks:
            self._ticks, self._since = process.ticks, now
        if now - self._since > STUCK_SECONDS:
            return f"has done nothing for {STUCK_SECONDS:g} s"
        return "takes too long" if now > self._until else None


def everybody() -> list[Process]:
    """Return all processes that can be seen."""
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def below(processes: Collection[Process], roots: Iterable[int]) -> set[int]:
    """Return the roots and all that they and their descendants have started and not left as orphans."""
    found = set(roots)
    while more := {one.pid for one in processes if one.parent in found} - found:
        found |= more
    return found


def of_job(mark: str, sessions: Collection[int]) -> set[int]:
    """Return the living processes with this mark, or in one of these sessions, and all below them."""
    processes = everybody()
    roots = {one.pid for one in processes if one.session in sessions or _is_marked(one.pid, mark)}
    return below(processes, roots) - {one.pid for one in processes if one.dead} - {os.getpid()}


def is_tidier(pid: int) -> bool:
    """Return whether this process cleans up behind others."""
    return any(name in _read(pid, "cmdline") for name in TIDIERS)


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has become somebody else's
        os.kill(pid, signal.SIGKILL)


def end(find: Callable[[], Collection[int]], looks: int = 2) -> set[int]:
    """Kill all that are found, tidiers once they have had time; return those that do not end.

    looks: so often in a row nobody has to be found: what was just being forked in one is seen in the next.
    """
    begun = time.monotonic()
    while looks > 0:
        passed = time.monotonic() - begun
        try:
            found = set(find())
        except OSError:  # there is no descriptor left to look
            if passed > ENDING_SECONDS:
                return set()
            time.sleep(LOOK_SECONDS)
            continue
        if passed > ENDING_SECONDS:
            return found
        for pid in found:
            if passed > TIDYING_SECONDS or not is_tidier(pid):
                kill(pid)
        looks -= not found
        if looks > 0:
            time.sleep(LOOK_SECONDS)
    return set()


def _is_marked(pid: int, mark: str) -> bool:
    return b"\0%s=%s\0" % (MARK.encode(), mark.encode()) in b"\0" + _read(pid, "environ")


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:  # it has ended, or is another user's
        return b""
