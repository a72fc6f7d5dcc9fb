"""One job a checkpoint directory: a lock that goes with the processes that hold it, also across hosts.

All processes of a run (agents, ranks) hold a record lock on DIR/job.lock, shared among them; which run that
is stands in the file. The kernel, or the file system's server, frees a lock when its process ends, however it
does, and no child inherits it. What is left then is a file without a lock, that the next job takes.
"""

import errno
import fcntl
import json
import os
import random
import socket
import time
from datetime import datetime
from pathlib import Path

from jitckpt.console import say
from jitckpt.errors import CheckpointError, SaveError
from jitckpt.saves import layout
from jitckpt.system.left_folders import NO_LOCKS
from jitckpt.system.regular_file import NoFileError, open_regular

LOCK_FILE = "job.lock"
PATIENCE_SECONDS = 30.0  # in which a job that was killed a moment ago may end
LOOK_SECONDS = 0.1
# By directory. Record locks are lost with the first descriptor of the file that the process closes, so there
# is but one.
_held: dict[Path, int] = {}


def hold(root: Path, run: str) -> str | None:
    """Take the directory for a run, or join its other processes; return why it can't be locked, if so.

    Raises CheckpointError if another run keeps it for PATIENCE_SECONDS.
    """
    if root in _held:
        return None
    try:
        file = open_regular(root / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            _wait_for(file, root, run)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        if error.errno not in NO_LOCKS or isinstance(error, NoFileError):
            raise CheckpointError(
                f"{root / LOCK_FILE} can't be written: {error.strerror}; check the file system, or choose "
                "another checkpoint directory."
            ) from error
        return (
            f"The file system of {root} has no locks ({error.strerror}): see to it that no other job uses "
            "this checkpoint directory at the same time."
        )
    _held[root] = file
    return None


def release(root: Path) -> None:
    """Let the directory go, as far as this process is concerned."""
    if root in _held:
        os.close(_held.pop(root))


def _wait_for(file: int, root: Path, run: str) -> None:
    until, said = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        if _lock(file, fcntl.LOCK_EX):  # there is nobody
            owner = {"run": run, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(owner).encode(), 0)
            fcntl.lockf(file, fcntl.LOCK_SH)  # in one moment
            return
        by = "another job"
        known = _lock(file, fcntl.LOCK_SH)  # as long as this is held nobody can write into the file
        if known:
            owner = _owner(file)
            if owner.get("run") == run:
                return
            by = _named(owner)
            fcntl.lockf(file, fcntl.LOCK_UN)
        if time.monotonic() > until:
            raise CheckpointError(
                f"{root} is in use by {by}. Two jobs can't share a checkpoint directory: wait until that one "
                "has ended, or choose another directory."
            )
        if known and not said:  # else somebody is just taking it: most likely another rank of this run
            say(f"{root} is in use by {by}; waiting {PATIENCE_SECONDS:g} s for its end.")
            said = True
        time.sleep(LOOK_SECONDS * random.SystemRandom().uniform(0.5, 1.5))


def _lock(file: int, kind: int) -> bool:
    """Take a lock, if no other process stands against it. Raises OSError where there are none."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _owner(file: int) -> dict[str, object]:
    try:
        return dict(layout.parse_object(os.pread(file, 1 << 16, 0), LOCK_FILE))
    except SaveError:
        return {}


def _named(owner: dict[str, object]) -> str:
    host, pid, begun = owner.get("host"), owner.get("pid"), owner.get("time")
    if not isinstance(host, str) or not isinstance(pid, int) or not isinstance(begun, float):
        return "another job"
    try:
        when = datetime.fromtimestamp(begun).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "another job"
    return f"another job, which took it at {when} on {host} (process {pid})"
