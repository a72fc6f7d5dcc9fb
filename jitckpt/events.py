"""What happens to a job, one JSON line an event in DIR/events.jsonl."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jitckpt.console import say
from jitckpt.system import regular_file
from jitckpt.system.disk_thread import DiskThread, Work

LAST_SECONDS = 5.0  # that the end of a job waits for its events to be written

FILE_NAME = "events.jsonl"

Event = Mapping[str, Any]


class EventLog:
    """Appends events to the checkpoint directory, and keeps them until that is known.

    Every event has `event` (its name), `time` (wall time, seconds since the epoch), `clock` (this machine's
    monotonic clock in seconds, for durations) and `restart` (how often the workers have been restarted);
    where a coordination service numbers the starts, `start` (this one's number). Several processes may append
    to one file: a line is one write.
    """

    def __init__(self, directory: Path | None = None, *, aside: bool = False) -> None:
        """aside: write on a thread of its own, so that a blocked file system blocks nobody; see `finish`."""
        self._disk = DiskThread("jitckpt-events") if aside else None
        self._lock = threading.Lock()
        self.events: list[Event] = []
        self.restart = 0
        self.leading = True  # of several hosts one writes, and says, what concerns all
        self.start = 0  # its number; see saves/starts.py
        self.superseded: Callable[[Path, int], bool] = lambda directory, start: False
        self._is_cut_off = False
        self._directory = directory
        self._unwritten: list[Event] = []
        self._problem = ""  # that was said last: a full disk would be said with every event

    def open(self, directory: Path) -> None:
        """Write to this directory from now on, unless one is known already."""
        with self._lock:
            self._directory = self._directory or directory
            self._flush()

    @property
    def directory(self) -> Path | None:
        """Where events are written, None while that is not known."""
        return self._directory

    def write(self, event: str, **details: object) -> None:
        """Add an event. What can't be written is said on stderr: a full disk must not stop a recovery."""
        line = {"event": event, "time": time.time(), "clock": time.monotonic(), "restart": self.restart}
        if self.start:
            line["start"] = self.start
        with self._lock:
            self.events.append(line | details)
            self._unwritten.append(self.events[-1])
            self._flush()

    def aside(self, work: Work) -> None:
        """Have something done, in order with the events, that may have to wait for the same file system."""
        if self._disk is None:
            work()
        else:
            self._disk.do(work)

    def finish(self) -> None:
        """Wait until all events are written, but not for ever."""
        if self._disk is not None and not self._disk.finish(LAST_SECONDS):
            say(f"events can't be written: the file system of {self._directory} does not answer.")

    def _flush(self) -> None:
        if not self.leading:
            self._unwritten.clear()
        if self._directory is None or not self._unwritten:
            return
        lines = "".join(json.dumps(event) + "\n" for event in self._unwritten)
        self._unwritten.clear()
        self.aside(partial(self._append, self._directory, self.start, lines.encode()))

    def _append(self, directory: Path, start: int, lines: bytes) -> None:
        if not self.may_write(directory, start):
            return
        problem = _append(directory / FILE_NAME, lines)
        if problem and problem != self._problem:
            say(problem)
        self._problem = problem

    def may_write(self, directory: Path, start: int) -> bool:
        """Return whether the job has not gone on without this process; the first time that is said."""
        try:
            is_cut_off = self.superseded(directory, start)
        except OSError as error:
            say(f"whether the job has gone on without this host can't be read: {error}.")
            is_cut_off = start > 0
        if is_cut_off and not self._is_cut_off:
            say(f"the job has gone on without this host: no more of start {start} is told in {directory}.")
        self._is_cut_off = is_cut_off
        return not is_cut_off


def _append(path: Path, lines: bytes) -> str:
    """Return why that can't be done, as a sentence; "" if it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = regular_file.open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            while lines:
                lines = lines[os.write(file, lines) :]
        finally:
            os.close(file)
    except OSError as error:
        return f"events can't be written to {path}: {error.strerror}."
    return ""


def read_events(directory: Path) -> tuple[list[Event], list[str]]:
    """Return the events of a checkpoint directory, oldest first, and a sentence for each damaged line.

    A line is damaged where a process died or the disk was full while it was written. Raises OSError where
    there is no such file.
    """
    path = directory / FILE_NAME
    events: list[Event] = []
    damages = []
    for number, line in enumerate(regular_file.content_of(path).splitlines(), start=1):
        event = parse_event(line)
        if event is not None:
            events.append(event)
        else:
            damages.append(f"Line {number} of {path} is damaged and passed over.")
    return events, damages


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line, None if it is damaged."""
    try:
        event: Event = json.loads(line)
        whole = isinstance(event["event"], str) and all(
            isinstance(event[name], int | float) for name in ("time", "clock", "restart")
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return event if whole else None
