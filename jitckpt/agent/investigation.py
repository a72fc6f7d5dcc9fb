"""Looks into a collective that does not end: asks the ranks where they are, says whether it is a failure."""

import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from jitckpt.agent.processes.workers import Worker
from jitckpt.console import say
from jitckpt.decisions import flight_recorder, hang
from jitckpt.decisions.hang import Diagnosis, diagnose
from jitckpt.events import EventLog
from jitckpt.system import nccl_ras
from jitckpt.system.kernel_log import xid_lines
from jitckpt.system.stacks import ask_for_stacks, read_stacks
from jitckpt.wire import protocol

MOST_STACKS = 8  # of late ranks, in a report
STACK_SECONDS = 10.0  # that a report waits for those of other hosts, while ranks save
DRIVER_SECONDS = 900.0  # of the kernel's log are looked through
NCCL_SECONDS = 4.0  # that a report that is ready waits for NCCL's own answer


@dataclass
class _Question:
    """What the ranks `asked` were asked; next_look: by when all answer or, once judged, when to ask again."""

    number: int
    reported: str
    asked: tuple[int, ...]
    patience: float
    next_look: float
    answers: dict[int, protocol.Progress] = field(default_factory=dict)
    judged: bool = False
    stopped: set[int] = field(default_factory=set)  # on other hosts


@dataclass
class _Report:
    """What is to be written once the stacks of the ranks `awaited` have come from other hosts.

    until: or by when. written: where ranks of this host write their stacks. driver: by host. nccl: is asked.
    """

    diagnosis: Diagnosis
    directory: Path
    until: float
    written: list[tuple[int, BinaryIO]] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    driver: dict[str, Sequence[str]] = field(default_factory=dict)
    nccl: nccl_ras.Question = field(default_factory=nccl_ras.Question)


class Investigation:
    """At most one at a time, in one start of the workers."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        order: Callable[[int, protocol.WorkerMessage], str | None],
        log: EventLog,
        stall_timeout: float,
        answer_within: float,
        *,
        ask_for_stacks: Callable[[int], None] = lambda rank: None,
    ) -> None:
        """workers: those of this host. order: gives any rank an order, or says why that can't be done.

        ask_for_stacks: asks the host of a rank for its Python stacks, for `hear_stacks`.
        Times in seconds, as for the supervisor.
        """
        self._workers, self._order, self._log = workers, order, log
        self._stall_timeout, self._answer_within = stall_timeout, answer_within
        self._ask_for_stacks = ask_for_stacks
        self._question: _Question | None = None
        self._questions = 0
        self._failure: Diagnosis | None = None  # not reported yet
        self._report: _Report | None = None
        self._groups: dict[frozenset[int], set[str]] = {}

    @property
    def next_look(self) -> float | None:
        """The monotonic time at which `verdict` should be asked, if nothing is heard before."""
        return None if self._question is None else self._question.next_look

    @property
    def report_due(self) -> float | None:
        """The monotonic time by which a report that is begun has to be written, None if there is none."""
        return None if self._report is None else self._report.until

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that caused the failure found just now: awaited, and they don't answer."""
        return () if self._failure is None else self._failure.blamed

    def begin(self, rank: int, message: protocol.Hang, askable: Sequence[int]) -> None:
        """A rank waits in a collective for unusually long: ask all those that can answer."""
        if self._question is None and self._failure is None:
            reported = f"rank {rank}'s {message.operation} made no progress for {message.seconds:.1f} s"
            self._ask(reported, message.seconds, askable)

    def name_group(self, group: protocol.Group) -> None:
        """Take note of what the training calls a group of ranks."""
        names = self._groups.setdefault(frozenset(group.ranks), set())
        if group.name not in names:
            names.add(group.name)
            self._log.write("group", name=group.name, ranks=group.ranks)

    def hear(self, rank: int, answer: protocol.Progress) -> None:
        """Take note of an answer."""
        if self._question is not None and answer.question == self._question.number:
            self._question.answers[rank] = answer

    def hear_stopped(self, rank: int) -> None:
        """Another host says that a signal has stopped the process of this rank, which it was to ask."""
        if self._question is not None:
            self._question.stopped.add(rank)

    def verdict(self, askable: Sequence[int], absent: Sequence[int]) -> str | None:
        """Return what has failed, as soon as the answers allow it; None: nothing, or it is too early to say.

        askable: the ranks that could answer now; absent: those that live but have not registered
        yet, or are at their ends.
        """
        question, now = self._question, time.monotonic()
        if question is None:
            return None
        silent = [rank for rank in question.asked if rank not in question.answers and rank in askable]
        if now < question.next_look and (silent or question.judged):
            return None
        if question.judged:
            self._ask(question.reported, question.patience, askable)
            return None
        # Who has registered since then could not be asked, either.
        unasked = {*absent, *askable} - set(question.asked)
        diagnosis = diagnose(
            question.answers, silent, unasked, patience=question.patience, groups=self._groups
        )
        if not diagnosis.waits and not silent:
            self._log.write("hang_over", text=question.reported)
            self._question = None
            return None
        if diagnosis.stragglers and diagnosis.seconds < self._stall_timeout:
            self._log.write("straggler", ranks=diagnosis.stragglers, text=str(diagnosis))
            say(f"{diagnosis}; it is alive, so the others wait for it.")
            question.judged = True
            question.next_look = now + max(question.patience, self._answer_within)
            return None
        self._question, self._failure = None, diagnosis
        found = str(diagnosis) if diagnosis.waits else f"{question.reported}, and {diagnosis}"
        stopped = [
            f"rank {rank} is stopped"
            for rank in silent
            if rank in question.stopped or (rank in self._workers and self._workers[rank].is_stopped())
        ]
        return ", ".join([found, *stopped])

    def begin_report(self, registrations: Mapping[int, protocol.Registered], directory: Path) -> None:
        """If there is something new to report, have the late ranks, on whichever host, write their stacks.

        directory: for the report.
        """
        diagnosis, self._failure = self._failure, None
        if diagnosis is None:
            return
        report = self._report = _Report(diagnosis, directory, time.monotonic() + STACK_SECONDS)
        report.nccl.start()
        for rank in (diagnosis.late or diagnosis.silent)[:MOST_STACKS]:
            if rank not in self._workers:
                report.awaited.add(rank)
                self._ask_for_stacks(rank)
            elif (file := stacks_of(self._workers[rank], registrations.get(rank))) is not None:
                report.written.append((rank, file))

    def read_stacks(self) -> None:
        """Read what the ranks of this host write, which may take a while."""
        report = self._report
        while report is not None and report.written:
            rank, file = report.written.pop()
            report.stacks[rank] = read_stacks(file)

    def hear_stacks(self, rank: int, text: str, host: str, driver: Sequence[str]) -> None:
        """Take note of the Python stacks of a rank on another host, empty if there are none.

        driver: what the driver there has told the kernel's log.
        """
        if self._report is not None and rank in self._report.awaited:
            self._report.awaited.remove(rank)
            self._report.stacks[rank] = text
            self._report.driver[host] = driver

    def finish_report(self, *, at_once: bool = False) -> None:
        """Write who waited for whom, with the late ranks' stacks, if all is there or it is time."""
        report = self._report
        if report is None:
            return
        if (report.written or report.awaited) and not at_once and time.monotonic() < report.until:
            return
        self.read_stacks()
        self._report = None
        report.stacks |= dict.fromkeys(report.awaited, "")
        path = report.directory / f"hang-{self._log.restart}-{self._questions}.txt"
        dumps = flight_recorder.dumps(report.diagnosis, self._workers, time.time())
        self._log.aside(partial(_write_report, path, report, dumps, self._log, self._log.start))

    def _ask(self, reported: str, patience: float, askable: Sequence[int]) -> None:
        self._questions += 1
        next_look = time.monotonic() + self._answer_within
        self._question = _Question(self._questions, reported, tuple(askable), patience, next_look)
        for rank in askable:
            problem = self._order(rank, protocol.AskProgress(self._questions))
            if problem is not None:
                self._log.write("warning", rank=rank, text=f"rank {rank} can't be asked: {problem}")


def _write_report(
    path: Path, report: _Report, dumps: Mapping[int, flight_recorder.Dump], log: EventLog, start: int
) -> None:
    """Write what people read, and beside it what torch's tool for flight recorders reads."""
    if not log.may_write(report.directory, start):
        return
    driver = report.driver | {socket.gethostname(): xid_lines(DRIVER_SECONDS)}
    report.nccl.join(NCCL_SECONDS)
    text = hang.report(report.diagnosis, report.stacks, driver, report.nccl.answer)
    try:
        path.write_text(text, errors="backslashreplace")
        folder = path.with_suffix("")
        folder.mkdir(exist_ok=True)
        for rank, dump in dumps.items():
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    except OSError as error:
        say(f"the report of the hang can't be written to {path}: {error.strerror}.")
        return
    log.write("hang_report", path=str(path))
    say(f"who waited for whom stands in {path}.")


def stacks_of(worker: Worker, registration: protocol.Registered | None) -> BinaryIO | None:
    """Have a worker write its Python stacks; return where, or None if it can't."""
    if registration is None or not registration.stack_signal or worker.has_ended(0) or worker.is_stopped():
        return None
    try:
        return ask_for_stacks(worker.pid, registration.stack_signal, registration.stack_fd)
    except OSError:
        return None  # it ends just now
