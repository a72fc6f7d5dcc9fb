"""Follows a checkpoint directory while its job runs: what its events and its agents' progress files say."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitckpt.decisions.memory_state import STATES
from jitckpt.events import FILE_NAME, Event, parse_event
from jitckpt.reports.job_model import JobModel
from jitckpt.reports.present import AgentsProgress, Present
from jitckpt.reports.whole_events import is_whole
from jitckpt.system import regular_file

PIECE = 1 << 22  # bytes read at a time
LONGEST_LINE = 1 << 24  # bytes; what is longer is no event
PROGRESS_FILES = "progress-*.json"
SILENT_AFTER = 30.0  # seconds without a word of the agent; then the job is not known to live
MOST_PROGRESS = 1 << 26  # bytes of a progress file


class Follower:
    """Reads what is new in a directory. It never writes there, and what it can't read is `problem`.

    events: of the last job. damaged: how many lines were passed over.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = JobModel()
        self.events: list[Event] = []
        self.damaged = 0
        self.problem = ""
        self.progress: AgentsProgress | None = None
        self._read = 0
        self._file: tuple[int, int] | None = None
        self._rest = b""

    def look(self) -> bool:
        """Take in what is new; return whether there was anything."""
        before = self._read, self.progress
        try:
            with regular_file.reading(self.directory / FILE_NAME) as file:
                self._read_on(file.fileno())
            self.problem = ""
        except FileNotFoundError:
            self.problem = f"There is no {self.directory / FILE_NAME}: no job writes there."
        except OSError as error:
            self.problem = f"{self.directory / FILE_NAME} can't be read: {error.strerror}"
        self.progress = self._read_progress()
        return before != (self._read, self.progress)

    def _read_on(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino)
        if identity != self._file or found.st_size < self._read:  # another file, or a new beginning
            self._file, self._read, self._rest = identity, 0, b""
            self.model, self.events = JobModel(), []
        while piece := os.pread(descriptor, PIECE, self._read):
            self._read += len(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._take(lines)
            if len(self._rest) > LONGEST_LINE:
                self._rest = b""
                self.damaged += 1

    def _take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            event = parse_event(line)
            if event is None or not is_whole(event):
                self.damaged += 1
                continue
            if event["event"] == "job_started":
                self.events = []
            self.events.append(event)
            self.model.take(event)

    def _read_progress(self) -> AgentsProgress | None:
        """Return what the agents of all hosts that write to this directory have told."""
        told = [_progress(path) for path in sorted(self.directory.glob(PROGRESS_FILES))]
        found = [one for one in told if one is not None]
        if not found:
            return None
        newest = max(found, key=lambda one: one.restart)
        same = [one for one in found if one.restart == newest.restart]
        seconds = [one.step_seconds for one in same if one.step_seconds is not None]
        return AgentsProgress(
            time=max(one.time for one in same),
            restart=newest.restart,
            steps={rank: step for one in same for rank, step in one.steps.items()},
            step_seconds=max(seconds, default=None),
            memory_states={rank: state for one in same for rank, state in one.memory_states.items()},
        )

    def present(self, now: float | None = None) -> Present | None:
        """Return how the job is; time in which its agent is known to be silent does not count."""
        return self.model.present(self._known_until(time.time() if now is None else now), self._of_this_job())

    def silent(self, now: float | None = None) -> float | None:
        """Return for how many seconds the agent of a living job has been silent; None if it is not."""
        at = time.time() if now is None else now
        known = self._known_until(at)
        return at - known if known < at else None

    def _of_this_job(self) -> AgentsProgress | None:
        """A progress file that an earlier job has left says nothing."""
        begun = self.events[0]["time"] if self.events else 0.0
        return self.progress if self.progress is not None and self.progress.time >= begun else None

    def _known_until(self, now: float) -> float:
        progress = self._of_this_job()
        if progress is None or not self.events or self.events[-1]["event"] == "job_ended":
            return now
        last = max(self.events[-1]["time"], progress.time)
        return now if now - last <= SILENT_AFTER else float(last)


def _progress(path: Path) -> AgentsProgress | None:
    try:
        with regular_file.reading(path) as file:
            document: Any = json.loads(file.read(MOST_PROGRESS))
        steps = {int(rank): int(step) for rank, step in document["steps"].items()}
        seconds = document.get("step_seconds")
        states = {int(rank): str(state) for rank, state in document.get("memory_states", {}).items()}
        return AgentsProgress(
            float(document["time"]),
            int(document["restart"]),
            steps,
            None if seconds is None else float(seconds),
            {rank: state for rank, state in states.items() if state in STATES},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # being replaced, or not ours
