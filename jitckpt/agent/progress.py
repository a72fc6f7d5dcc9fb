"""Tells who looks at the job how far its ranks are: a small file beside the events, written anew and anew.

It is read from the ranks' memory on a thread of its own, so it costs neither a rank nor the control thread
anything, and a file system that does not answer holds up this thread alone.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from jitckpt.console import say
from jitckpt.decisions.memory_state import State, snapshot_state
from jitckpt.errors import JitckptError
from jitckpt.events import EventLog
from jitckpt.ring import local_state
from jitckpt.tiers import host_memory

SECONDS = 2.0  # between two looks
REMEMBERED = 30  # looks from which the time of a step is told


class ProgressTeller(threading.Thread):
    """Writes DIR/progress-HOST.json for one start of a host's workers, until it is stopped."""

    def __init__(
        self,
        rings: Mapping[int, int],
        log: EventLog,
        host: int,
        memories: Mapping[int, int] | None = None,
        on_progress: Callable[[int, float | None, int], None] | None = None,
    ) -> None:
        """rings: the descriptors of the ranks' rings; memories: of their snapshots, with a memory tier.

        Ours are copies, which nobody else closes. on_progress: called with the slowest rank's step, the
        seconds that one takes, and the restarts so far; it may not wait for anybody.
        """
        super().__init__(name="jitckpt-progress", daemon=True)
        self._rings = {rank: os.dup(ring) for rank, ring in rings.items()}
        self._memories = {rank: os.dup(memory) for rank, memory in (memories or {}).items()}
        self._log, self._on_progress = log, on_progress
        self._restart, self._start = log.restart, log.start
        self._name = f"progress-{host}.json"
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._stopped = threading.Event()
        self._reads = (
            threading.Lock()
        )  # held while the rings are read, never while a file system is waited for
        self._said = False

    def stop(self) -> None:
        """Let it end; nobody waits for what it still writes."""
        with self._reads:
            with suppress(JitckptError, OSError):
                self._look()  # what the ranks have come to since the last one
            self._stopped.set()
            for descriptor in (*self._rings.values(), *self._memories.values()):
                os.close(descriptor)

    def run(self) -> None:
        """Look and tell, again and again."""
        while not self._stopped.wait(SECONDS):
            directory = self._log.directory
            if directory is not None:
                self._tell(directory)

    def _tell(self, directory: Path) -> None:
        try:
            with self._reads:
                if self._stopped.is_set():
                    return
                steps = self._look()
                states = {rank: _memory_state(memory) for rank, memory in self._memories.items()}
            self._write(
                directory,
                {rank: step for rank, step in steps.items() if step},
                {rank: state for rank, state in states.items() if state is not None},
            )
        except (JitckptError, OSError) as error:
            if not self._said:
                self._said = True
                say(f"how far the ranks are can't be told in {directory / self._name}: {error}")

    def _look(self) -> dict[int, int]:
        """Return the step of each rank."""
        steps = {rank: local_state.begun_step(ring) for rank, ring in self._rings.items()}
        slowest = min(steps.values())
        if not self._seen or slowest != self._seen[-1][1]:
            self._seen.append((time.monotonic(), slowest))
        if self._on_progress is not None and slowest:
            self._on_progress(slowest, self._step_seconds(), self._restart)
        return steps

    def _write(self, directory: Path, steps: Mapping[int, int], memory_states: Mapping[int, State]) -> None:
        told = {
            "time": time.time(),
            "restart": self._restart,
            "steps": steps,
            "step_seconds": self._step_seconds(),
            "memory_states": memory_states,
        }
        if self._stopped.is_set() or not self._log.may_write(directory, self._start):
            return  # the next start's is newer
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f".{self._name}.new"
        new.write_text(json.dumps(told))
        new.replace(directory / self._name)

    def _step_seconds(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        return (end - begin) / (last - first) if last > first else None


def _memory_state(memory: int) -> State | None:
    if host_memory.word(memory, host_memory.OFF):
        return None
    return snapshot_state(
        host_memory.word(memory, host_memory.BEGUN), host_memory.word(memory, host_memory.SAFE)
    )
