"""Has a job whose script knows nothing of it give its devices and its memory back, and go on later.

All ranks wait behind a step; their servers end; their processes are dumped by CRIU to files, and made again
from them with the same numbers when that is asked for. This process stays: it has the job's store, and the
other ends of what leads to the workers. Whoever calls this is the supervisor's thread, which does nothing
else while the job is suspended, so that no limit of time passes.
"""

import contextlib
import os
import re
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.callers import STATUS_FAILED, Callers
from jitckpt.agent.migration.image_folder import DamagedImage, ImageFolder, Written, remove_left
from jitckpt.agent.migration.move import LIMIT, Dumped, MoveError, Mover, reap
from jitckpt.agent.migration.side_by_side import all_of
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.processes.children import Children
from jitckpt.bindings import criu
from jitckpt.bindings.criu import CriuError
from jitckpt.console import show_size
from jitckpt.decisions.transparent import suspension
from jitckpt.decisions.transparent.suspension import CannotSuspend
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived
from jitckpt.system import network_lock
from jitckpt.system.job_socket import Caller
from jitckpt.system.resting_place import RestingPlace
from jitckpt.wire.commands import ResumeJob, Suspend, ToLauncher

LOOK_SECONDS = 0.2  # between two looks whether the job was told to end while it is suspended
SLOWEST_DISK = 20e6  # bytes a second
TRIES = 5  # to tell all ranks of a step before one has come to it


class Suspending:
    """Of one start of the ranks, all on this host."""

    servers_stay = False  # a suspended job has no devices

    def __init__(
        self,
        mover: Mover,
        ranks: Sequence[int],
        place: RestingPlace,
        directory: Path,
        log: EventLog,
        *,
        say: Callable[[str], None],
        children: Children,
        end_spares: Callable[[], None],
        is_interrupted: Callable[[], bool],
    ) -> None:
        """directory: the job's. is_interrupted: whether it was told to end. Raises OSError."""
        self._mover, self._ranks, self._place, self._directory = mover, list(ranks), place, directory
        self._log, self._say, self._children = log, say, children
        self._end_spares, self._is_interrupted = end_spares, is_interrupted
        self._suspension = suspension.Suspension()
        self._callers = Callers(directory, self._hear)
        self._remove_left(directory)
        self._to = directory
        self._images: ImageFolder | None = None
        self._asked_at = 0.0
        self._suspended_at = 0.0

    # What the proxies ask of it.

    @property
    def next_look(self) -> float | None:
        """When `look` should be called, if nothing happens before."""
        return None

    def look(self) -> None:
        """Nothing depends on the time."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector's owner call what it finds as data when something comes."""
        self._callers.watch(selector)

    def close(self) -> None:
        """The ranks have ended."""
        self._remove_images()
        self._callers.close()

    def note(self, event: str, details: Mapping[str, object]) -> None:
        """Take note of an event of the job."""
        match event:
            case "no_rest" if self._suspension.phase == "asked":
                self._is_over(f"The job was not suspended: {details['text']}.")
            case "recovery_given_up" | "switched_off" if self._suspension.phase != "running":
                what = "resumed" if self._suspension.phase == "resuming" else "suspended"
                self._is_over(f"The job could not be {what}. {details['text']}")
            case "rested" if self._suspension.phase == "resuming":
                seconds = time.monotonic() - self._asked_at
                away = time.monotonic() - self._suspended_at
                self._log.write("resumed", step=self._suspension.step, seconds=seconds, suspended=away)
                text = (
                    f"the job goes on after step {self._suspension.step}: it was resumed in {seconds:.2f} s."
                )
                self._say(text)
                self._is_over(text, 0)

    def hear_host(self, arrived: Arrived) -> None:
        """There is but one host."""
        raise KeyError(f"host {arrived.host} speaks of a suspension")

    def lose_host(self, host: int) -> bool:
        """There is no other host."""
        del host
        return False

    @property
    def suspended(self) -> bool:
        """The launcher stays while the job is suspended."""
        return False

    def carry_out(self, go_on: Callable[[], None]) -> None:
        """All ranks rest, and their servers have ended. Returns once they are to go on, or are lost."""
        self._carry_out()
        go_on()

    def _carry_out(self) -> None:
        self._place.want(0)
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            dumped: list[Dumped] = []
            try:
                stack.enter_context(self._mover.worker(self._ranks[0]).being_made_again())
                written = self._dump_all(dumped, stack)
            except (MoveError, CriuError, StoreError, OSError) as error:
                self._fail(dumped, error)
                return
            self._note_suspended(dumped, written, time.monotonic() - begun)
            while self._suspension.phase == "suspended" and not self._is_interrupted():
                self._callers.serve(LOOK_SECONDS)
            if self._suspension.phase == "suspended":
                self._lose(dumped, "it was told to end while it was suspended.")
            else:
                self._make_all_again(dumped, written)

    # What commands ask for.

    def _hear(self, caller: Caller, asked: ToLauncher) -> None:
        match asked:
            case Suspend(ends=True):
                caller.hear(
                    "The job was not suspended: the launcher of a job on one host stays, unless it runs with "
                    "--snapshot-every.",
                    STATUS_FAILED,
                )
            case Suspend(to):
                self._suspend(caller, Path(to) if to else self._directory)
            case ResumeJob():
                self._resume(caller)

    def _suspend(self, caller: Caller, to: Path) -> None:
        try:
            asked = self._suspension.ask(self._place.steps)
            if not isinstance(asked, CannotSuspend) and (reason := self._why_not(to)):
                asked = CannotSuspend(reason)
        except (MoveError, OSError) as error:
            asked = CannotSuspend(str(error))
        for _ in range(TRIES):
            if isinstance(asked, CannotSuspend):
                break
            self._place.want(asked.step)
            if not suspension.came_too_late(self._place.steps, asked.step):
                self._suspension, self._callers.waits, self._to = asked, caller, to
                self._asked_at = time.monotonic()
                self._log.write("suspension_wanted", step=asked.step, to=str(to))
                caller.hear(f"It is suspended once all ranks have ended step {asked.step}.")
                return
            self._place.want(0)
            asked = self._suspension.ask(self._place.steps)
        reason = (
            asked.reason
            if isinstance(asked, CannotSuspend)
            else "Its steps are too short to meet behind one."
        )
        caller.hear(f"The job was not suspended: {reason}", STATUS_FAILED)

    def _why_not(self, to: Path) -> str:
        """Return why the job can't be suspended now; "" if it can. Raises MoveError or OSError."""
        if not self._mover.proxies.recovers:
            return "Transparent mode is switched off, or has given up."
        if not self._mover.proxies.all_connected:
            return "Not all ranks use their devices yet."
        for rank in self._ranks:
            self._mover.look(rank, into_memory=False)
        self._remove_left(to)
        to.mkdir(parents=True, exist_ok=True)
        needed, status = sum(map(self._bytes_of, self._ranks)), os.statvfs(to)
        free = status.f_bavail * status.f_frsize
        if suspension.lacks_room(needed, free):
            return f"Its images need {show_size(needed)}, and {show_size(free)} are free in {to}."
        return ""

    def _remove_left(self, within: Path) -> None:
        for path in remove_left(within):
            self._say(f"{path} is removed: images of a job whose launcher was killed can't be resumed.")

    def _bytes_of(self, rank: int) -> int:
        return looked_at.image_bytes(self._mover.worker(rank).pid)

    def _resume(self, caller: Caller) -> None:
        asked = self._suspension.resume(self._taken() if self._suspension.phase == "suspended" else ())
        if isinstance(asked, CannotSuspend):
            caller.hear(f"The job was not resumed: {asked.reason}", STATUS_FAILED)
            return
        self._suspension, self._callers.waits, self._asked_at = asked, caller, time.monotonic()

    def _taken(self) -> list[str]:
        """Return who has a number that a process or a thread of a suspended rank had, as clauses."""
        assert self._images is not None
        found = []
        for rank in self._ranks:
            for name in os.listdir(self._images.of(rank)):
                match = re.fullmatch(r"core-(\d+)\.img", name)
                if match and (process := looked_at.name_of(int(match[1]))):
                    found.append(f"there is a process {match[1]} ({process})")
        return found

    # What is done.

    def _dump_all(self, dumped: list[Dumped], stack: contextlib.ExitStack) -> list[Written]:
        """Dump all ranks; put each into `dumped`. Raises MoveError, CriuError, StoreError or OSError."""
        self._images = images = ImageFolder(self._to)
        self._children.note_images(images.path)
        mover = self._mover
        ready = [
            mover.prepared(rank, images.of(rank), stack, into_memory=False, keeps_clock=True)
            for rank in self._ranks
        ]
        found = mover.dump_all(ready, LIMIT + sum(map(self._bytes_of, self._ranks)) / SLOWEST_DISK)
        dumped += [one for one in found if isinstance(one, Dumped)]
        for one in dumped:
            reap(one.pids)
        all_of(found)
        return [images.written(rank) for rank in self._ranks]

    def _note_suspended(self, dumped: Sequence[Dumped], written: Sequence[Written], dump: float) -> None:
        assert self._images is not None
        self._end_spares()
        self._suspended_at = time.monotonic()
        seconds, size = self._suspended_at - self._asked_at, sum(one.bytes for one in written)
        count, memory = sum(len(one.pids) for one in dumped), looked_at.resident_bytes()
        self._suspension = self._suspension.suspended()
        self._log.write(
            "suspended",
            step=self._suspension.step,
            pids=[list(one.pids) for one in dumped],
            bytes=size,
            to=str(self._images.path),
            dump=dump,
            seconds=seconds,
            launcher=memory,
        )
        text = (
            f"the job is suspended after step {self._suspension.step}: {count} processes of {len(dumped)} "
            f"rank{'s' if len(dumped) > 1 else ''} are {show_size(size)} of images in {self._images.path} "
            f"({seconds:.2f} s). This launcher (process {os.getpid()}) stays, with {show_size(memory)} of "
            "memory."
        )
        self._say(text)
        self._callers.tell(text, 0)

    def _fail(self, dumped: Sequence[Dumped], error: Exception) -> None:
        """The job runs on: those who were dumped are made again."""
        assert self._images is not None or not dumped
        if self._images is not None:
            for rank in set(self._ranks) - {one.rank for one in dumped}:
                self._unlock(rank)
        back = self._back(dumped)
        self._log.write("suspension_failed", text=str(error))
        text = f"The job was not suspended: {error}"
        self._say(text if back else f"{text} Not all of its processes could be made again.")
        self._is_over(text)

    def _back(self, dumped: Sequence[Dumped]) -> bool:
        """Make ranks again; return whether that was possible for all. The others count as killed."""
        whole, limit = True, LIMIT + sum(one.bytes for one in dumped) / SLOWEST_DISK
        for rank, took in self._mover.restore(dumped, limit).items():
            if not isinstance(took, float):
                self._log.write("move_failed", rank=rank, text=str(took))
                self._say(f"rank {rank} could not be made again: {took}")
                self._unlock(rank)
                whole = False
        return whole

    def _make_all_again(self, dumped: Sequence[Dumped], written: Sequence[Written]) -> None:
        assert self._images is not None
        try:
            for one, before in zip(dumped, written, strict=True):
                self._images.check(one.rank, before)
        except (DamagedImage, OSError) as error:
            self._lose(dumped, f"it can't be resumed: {error}")
            return
        begun = time.monotonic()
        self._back(dumped)
        self._log.write("made_again", ranks=[one.rank for one in dumped], seconds=time.monotonic() - begun)

    def _lose(self, dumped: Sequence[Dumped], why: str) -> None:
        """The ranks count as killed. why: the end of a sentence."""
        for one in dumped:
            self._unlock(one.rank)
            self._mover.worker(one.rank).not_made_again()
        text = f"The suspended job is lost: {why}"
        self._log.write("suspension_lost", text=why)
        self._say(text)
        self._is_over(text)

    def _unlock(self, rank: int) -> None:
        """Take away CRIU's locks on connections that will not be made again."""
        assert self._images is not None
        with contextlib.suppress(OSError):  # the network's tables went before
            network_lock.unlock(criu.locks(self._images.of(rank)))

    def _is_over(self, text: str, status: int = STATUS_FAILED) -> None:
        self._suspension = self._suspension.over()
        self._place.want(0)
        self._remove_images()
        self._callers.tell(text, status)

    def _remove_images(self) -> None:
        if self._images is not None:
            self._images.remove()
            self._images = None
            self._children.note_images(None)
