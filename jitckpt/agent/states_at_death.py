"""A dead rank's own states are on the disk at once, and not only when the others have saved.

Until then they lie in the agent's memory alone, and the agent may be the next to die. Which step the others
save is not known yet, so all are written; local_state_saves removes those that nobody needs, and
writes the others again: a rank that an exception ends lives a while, and so does its device.
"""

import contextlib
import os
import threading
from pathlib import Path

from jitckpt.errors import JitckptError
from jitckpt.ring import local_state

BY = "death"  # the same may be written at the same time, when the others have saved
PATIENCE_SECONDS = 1.0  # with a disk that is slow, at the end of a start


class StatesAtDeath:
    """Writes them on threads, as a disk may not answer. For one thread at a time."""

    def __init__(self) -> None:
        self._threads: dict[int, threading.Thread] = {}
        self._over = threading.Event()

    def write(self, rank: int, ring_fd: int, directory: Path) -> None:
        """Begin to write a rank's states, unless that has begun; the ring may be closed meanwhile."""
        if rank in self._threads:
            return
        try:
            own = os.dup(ring_fd)
        except OSError:  # no descriptor is left: they are written when the others have saved
            return
        thread = threading.Thread(
            target=self._write, args=(own, directory), name="jitckpt-death", daemon=True
        )
        self._threads[rank] = thread
        thread.start()

    def finish(self) -> None:
        """Stop, and wait for what is under way: what is written after this stays."""
        self._over.set()
        for thread in self._threads.values():
            thread.join()

    def close(self) -> None:
        """Stop, and wait for what is under way, as long as the disk answers."""
        self._over.set()
        for thread in self._threads.values():
            thread.join(PATIENCE_SECONDS)

    def _write(self, ring_fd: int, directory: Path) -> None:
        # What can't be written is tried again, and told of, when the others have saved.
        with os.fdopen(ring_fd), contextlib.suppress(JitckptError, OSError):
            for step in sorted((state.step for state in local_state.read(ring_fd)), reverse=True):
                if self._over.is_set():
                    return
                local_state.write_save(ring_fd, directory, step, BY, local_state.SAVER_AT_DEATH)
