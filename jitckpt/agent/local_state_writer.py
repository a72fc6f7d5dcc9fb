"""Writes what ranks alone knew, once all have ended, beside the control thread: the file system may block."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from jitckpt.saves import folders
from jitckpt.saves.starts import Superseded
from jitckpt.system import descriptor_reserve

Write = Callable[[int, Path, set[int], str, bool], dict[int, int]]


class LocalStateWriter(threading.Thread):
    """Writes the states in some ranks' rings, each of them whole or not at all.

    written: of each rank, the bytes by step. problems: of the others, why theirs is lost. not_needed: the job
    has gone on without this host, so what is lost is not said here. All are for whoever has been told that
    all is done.
    """

    def __init__(
        self,
        rings: Mapping[int, int],
        *,
        copied: set[int],
        directory: Path,
        steps: set[int],
        is_host_missed: bool,
        write: Write,
        done: Callable[[], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """rings: memory files by rank, of which this object uses copies. copied: ranks of other hosts.

        steps, is_host_missed, write: see supervisor.Reports.write_local_states. before, done: are called on
        this thread.
        """
        super().__init__(name="jitckpt-local-states", daemon=True)
        self._rings = dict(rings)
        self._own: set[int] = set()  # descriptors
        with suppress(OSError):  # no descriptor is left: then the others' are used, as long as they are open
            for rank, ring in rings.items():
                self._rings[rank] = os.dup(ring)
                self._own.add(self._rings[rank])
        self._is_host_missed = is_host_missed
        self._copied, self._write, self._done, self._before = copied, write, done, before
        self.directory, self.steps = directory, steps
        self.written: dict[int, dict[int, int]] = {}
        self.problems: dict[int, str] = {}
        self.not_needed = False
        self.seconds = 0.0
        self._ending = threading.Lock()
        self._is_given_up = False
        self.is_done = False

    def run(self) -> None:
        begun = time.monotonic()
        self._before()
        with suppress(OSError):  # if a part of it is lost later, that is no reason to begin anew
            for step in self.steps:
                folders.note_whole(self.directory, step)
        for rank, ring in self._rings.items():
            if not self._is_given_up:
                # A rank's own host may write the same at the same time into a directory that all share.
                by = "copy" if rank in self._copied else ""
                try:
                    with descriptor_reserve.lent():
                        self.written[rank] = self._write(
                            ring, self.directory, self.steps, by, self._is_host_missed
                        )
                except Superseded:
                    self.not_needed = True
                except Exception as error:
                    self.problems[rank] = str(error) or repr(error)
            if ring in self._own:
                os.close(ring)
        self.seconds = time.monotonic() - begun
        with self._ending:
            self.is_done = True
            if not self._is_given_up:
                self._done()

    def give_up(self) -> None:
        """Nobody waits any more: write nothing new, call nobody."""
        with self._ending:
            self._is_given_up = True
