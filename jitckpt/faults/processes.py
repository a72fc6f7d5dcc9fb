"""Rehearsed failures of processes that are more than a signal to the rank (docs/reference/faults.md)."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jitckpt.bindings import interpreter, memory
from jitckpt.system import process_tree
from jitckpt.wire import environment

# These befall what the agent has beside the ranks, and so are the agent's to do.
AGENTS_KINDS = ("guardian", "template", "agent-clock")
_FIRST_OF_OTHERS = 3  # descriptors: after standard input, output and errors
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate")
_NO_DISK = ("/dev/", "/proc/")
_SIGNALS_ALL = (
    "import sys; sys.path.append(sys.argv[1]); from jitckpt.faults.processes import signal_below; "
    "signal_below(int(sys.argv[2]))"
)


def never_rest() -> None:
    """Have garbage looked for with nearly every object that is made, from now on."""
    gc.set_threshold(1, 1, 1)


def close_descriptors() -> None:
    """Close what the program has not opened, and all else, as daemons and sudo do."""
    os.closerange(_FIRST_OF_OTHERS, os.sysconf("SC_OPEN_MAX"))


def block_disk() -> None:
    """Let all that this process would write to files, or make and rename, wait for ever."""
    sys.dont_write_bytecode = True  # else an import would wait
    sys.addaudithook(_wait_for_disk)


def _wait_for_disk(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        opens = isinstance(path, str | bytes) and isinstance(flags, int) and flags & _WRITES
        if not opens or os.fsdecode(path).startswith(_NO_DISK):  # type: ignore[arg-type]
            return
    elif event not in _CHANGES:
        return
    while True:
        time.sleep(1)


def signal_all() -> None:
    """Have SIGTERM sent to all processes of the job at once, by one that is none of them, as scancel does."""
    agent = environment.AGENT_PID.get()
    if agent is None:
        return
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", _SIGNALS_ALL, root, str(agent)], start_new_session=True, check=True
    )


def signal_below(agent: int) -> None:
    """Send SIGTERM to this process and all below it, but not to the calling one."""
    for pid in process_tree.below(process_tree.everybody(), [agent]) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


BY_KIND: dict[str, Callable[[], None]] = {
    "segfault": memory.read_nowhere,
    "gil-hold": interpreter.hold_gil,
    "gc": never_rest,
    "close-fds": close_descriptors,
    "signal-all": signal_all,
    "blocked-disk": block_disk,
}
