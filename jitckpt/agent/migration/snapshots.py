"""Has all ranks of a job written to files now and then, while they go on: to go back there if one dies.

A snapshot is what a suspended job is (suspending.py), but that the processes run on. Whoever calls this is
the supervisor's thread; the files are put on the disk by another one (shelf.py), while the training goes on.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.move import LIMIT, MoveError, Mover, peeked
from jitckpt.agent.migration.shelf import Draft, Shelf, Size
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.migration.suspending import SLOWEST_DISK, TRIES
from jitckpt.agent.proxies.step_barrier import StepBarrier
from jitckpt.bindings import criu
from jitckpt.bindings.criu import CriuError
from jitckpt.console import show_size
from jitckpt.decisions.belongings import Carried
from jitckpt.decisions.transparent import suspension, validation
from jitckpt.decisions.transparent.suspension import CannotSuspend
from jitckpt.events import EventLog
from jitckpt.system import network_lock
from jitckpt.system.resting_place import RestingPlace
from jitckpt.wire.moves import DumpedRank

ROOM = 2.5  # times the images, that are free where they are written to memory first
DUMPS = 4  # of a rank, of which one has to come between two words that it says
PROVEN = ("validated", "state_stays", "state_in_images")  # events by which a minibatch is known to be valid


class ProcessSnapshots:
    """Of one start of the ranks, all on this host."""

    def __init__(
        self,
        mover: Mover,
        ranks: Sequence[int],
        shelf: Shelf,
        log: EventLog,
        *,
        every: float,
        say: Callable[[str], None],
        place: RestingPlace,
        barrier: StepBarrier | None,
        gone_back_to: int | None,
    ) -> None:
        """every: seconds from one to the next. gone_back_to: the step of the snapshot that they come from."""
        self._mover, self._ranks, self._place, self._barrier = mover, list(ranks), place, barrier
        self._shelf, self._every, self._log, self._say = shelf, every, log, say
        self._begun = time.monotonic()
        self._asked_at = 0.0  # 0: all go on
        self._due: float | None = None  # from the first minibatch on that is known to be valid
        self._gone_back_to = gone_back_to
        self._step = self._bytes = 0  # of the newest, as far as it is known before
        self._held_at = 0.0  # since when the last rank waits
        self._dumped_at = 0.0
        self._phases: dict[str, float] = {}  # of the newest's pause, in seconds
        self._off = self._said = False

    # What the proxies ask of it.

    @property
    def next_look(self) -> float | None:
        """When `look` should be called, if nothing happens before."""
        return None if self._off or self._asked_at else self._due

    def look(self) -> None:
        """Ask for a snapshot if it is time to."""
        due = self.next_look
        if due is not None and time.monotonic() >= due:
            ready = self._mover.proxies.recovers and self._mover.proxies.all_connected
            ready = ready and not any(self._mover.worker(rank).has_ended(0) for rank in self._ranks)
            if ready and not self._shelf.is_busy:
                self._ask()
            self._due = time.monotonic() + self._every

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Nobody speaks to it."""

    def close(self) -> None:
        """The ranks have ended."""

    def note(self, event: str, details: Mapping[str, object]) -> None:
        """Take note of an event of the job."""
        match event:
            case "no_rest" if self._asked_at:
                self._fail(f"{details['text']}.")
            case "recovery_given_up" | "switched_off":
                self._off = True
                if validation.RELIED in str(details["text"]):  # what was recovered may be in the snapshot
                    self._shelf.settle()
                    self._shelf.forget()
            case "rested" if self._gone_back_to is not None:
                step, self._gone_back_to = self._gone_back_to, None
                self._due = time.monotonic() + self._every
                seconds = time.monotonic() - self._begun
                self._log.write("gone_back", step=step, seconds=seconds)
                self._say(f"all ranks go on from the snapshot after step {step} ({seconds:.2f} s).")
            case "held":
                self._held_at = time.monotonic()
            case "rested" if self._asked_at:
                now, self._asked_at = time.monotonic(), 0.0
                self._due = now + self._every
                phases = {**self._phases, "device": now - self._dumped_at}
                self._log.write("snapshot_pause", step=self._step, **phases, seconds=now - self._held_at)
            case _ if event in PROVEN and self._due is None and not self._off:
                self._due = time.monotonic() + self._every
                self._check()

    def carry_out(self) -> None:
        """All ranks rest, and their servers have ended. Returns once they are to go on."""
        self._place.want(0)
        begun = time.monotonic()
        draft: Draft | None = None
        try:
            in_memory = looked_at.available_memory() > ROOM * self._bytes
            draft = self._shelf.begin(self._step, in_memory=in_memory)
            plan = self._dump_all(draft)
        except (MoveError, CriuError, StoreError, OSError, RuntimeError) as error:
            if draft is not None:
                draft.drop()
            self._fail(str(error))
            return
        self._dumped_at = time.monotonic()
        self._phases = {"stop": begun - self._held_at, "dump": self._dumped_at - begun}
        step = self._step

        def done(size: Size, error: OSError | None) -> None:
            if error is not None:
                self._tell(f"of step {step} could not be put on the disk: {error}.")
                return
            self._log.write(
                "snapshot",
                step=step,
                bytes=size.images,
                stored=size.stored,
                disk=size.disk,
                seconds=time.monotonic() - begun,
            )

        self._shelf.put(draft, plan, done)

    # What is decided.

    def _check(self) -> None:
        """Switch it off with a sentence if something can't be carried, as soon as all is under way."""
        try:
            for rank in self._ranks:
                self._look(rank)
        except (MoveError, OSError) as error:
            self._off = True
            self._log.write("snapshots_off", text=str(error))
            self._say(f"no snapshots are made: {error} A worker that dies ends the job, or begins it anew.")

    def _look(self, rank: int) -> Carried:
        if any(event["event"] == "registered" for event in self._log.events):
            raise MoveError("The script has called jitckpt.init, which makes saves of its own.")
        return self._mover.look(rank, elsewhere=True, into_memory=False)

    def _ask(self) -> None:
        reason = self._why_not()
        for _ in range(0 if reason else TRIES):
            step = suspension.meeting(self._place.steps)
            if isinstance(step, CannotSuspend):
                reason = step.reason
                break
            self._place.want(step)
            if not suspension.came_too_late(self._place.steps, step):
                self._step, self._asked_at = step, time.monotonic()
                self._log.write("snapshot_wanted", step=step)
                return
            self._place.want(0)
            reason = "its steps are too short to meet behind one."
        self._fail(reason)

    def _why_not(self) -> str:
        """Return why none can be made now, as the end of a sentence; "" if it can."""
        try:
            for rank in self._ranks:
                self._look(rank)
            self._bytes = needed = sum(
                looked_at.image_bytes(self._mover.worker(rank).pid) for rank in self._ranks
            )
            free = self._shelf.free
        except (MoveError, OSError) as error:
            return str(error)
        if suspension.lacks_room(needed, free):
            return f"it needs {show_size(needed)} beside the one before, and {show_size(free)} are free."
        return ""

    def _fail(self, why: str) -> None:
        self._place.want(0)
        self._asked_at = 0.0
        self._tell(f"could not be made: {why}")

    def _tell(self, text: str) -> None:
        newest = self._shelf.newest
        self._log.write("snapshot_failed", text=text, newest=None if newest is None else newest.step)
        if not self._said:
            self._said = True
            has = "there is none" if newest is None else f"the newest is that after step {newest.step}"
            self._say(f"a snapshot {text} The training goes on; {has}.")

    # What is done.

    def _dump_all(self, draft: Draft) -> dict[str, Any]:
        """Dump all ranks; return the plan. Raises MoveError, CriuError, StoreError, OSError, RuntimeError."""
        mover = self._mover
        with contextlib.ExitStack() as stack:
            stack.enter_context(mover.worker(self._ranks[0]).being_made_again())
            whats = {rank: self._look(rank) for rank in self._ranks}
            stores = {rank: stack.enter_context(mover.store_at_rest(whats[rank])) for rank in self._ranks}
            with ThreadPoolExecutor(len(self._ranks)) as pool:
                dumps = [
                    pool.submit(self._dump_one, draft, rank, whats[rank], stores[rank])
                    for rank in self._ranks
                ]
            told = [one.result() for one in dumps]
            kept = contents(*mover.relay.store, mover.relay.written)
        return {
            "step": draft.step,
            "rest": mover.proxies.at_this_rest,
            "relay": mover.relay.name,
            "store": {key.hex(): value.hex() for key, value in kept.items()},
            "barrier": "" if self._barrier is None else self._barrier.content.hex(),
            "steps": self._place.steps,
            "ranks": [asdict(one) for one in told],
        }

    def _dump_one(
        self, draft: Draft, rank: int, what: Carried, stores: Mapping[str, socket.socket]
    ) -> DumpedRank:
        """Dump a rank so that nothing it has said or written is both in its image and not, or neither."""
        mover, folder = self._mover, draft.of(rank)
        worker = mover.worker(rank)
        sockets = {**mover.sockets(rank), **stores}
        if os.fstat(worker.ring_fd).st_size:
            raise MoveError("The script has called jitckpt.init, which makes saves of its own.")
        mover.wait_until_read(sockets)
        limit = LIMIT + looked_at.image_bytes(worker.pid) / SLOWEST_DISK
        for _ in range(DUMPS):
            draft.again(rank)
            before = self._outside(worker.pid, sockets)
            try:
                mover.dump(rank, folder, what, limit, leaves_running=True)
            finally:
                network_lock.unlock(criu.locks(folder))
            if self._outside(worker.pid, sockets) == before:
                break
        else:
            raise MoveError(f"Rank {rank} says or writes something all the time, though it is held.")
        said, files = before
        return mover.told_of(rank, mover.pids(rank, folder), what, stores=stores, said=said, files=files)

    def _outside(
        self, pid: int, sockets: Mapping[str, socket.socket]
    ) -> tuple[dict[str, list[bytes]], dict[str, int]]:
        """Return what a rank has said that nobody has read, and how long the files are that it writes."""
        return {name: peeked(one) for name, one in sockets.items()}, looked_at.written_files(pid)


def _name(key: bytes) -> str:
    """Return how torch's clients say it: they put a slash before it."""
    return key.removeprefix(b"/").decode()


def contents(host: str, port: int, keys: set[bytes]) -> dict[bytes, bytes]:
    """Return what the job's store has of these keys. Raises MoveError or RuntimeError (torch's)."""
    store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False)
    found: dict[bytes, bytes] = {}
    for raw in sorted(keys):
        name = _name(raw)
        if store.queue_len(name):
            raise MoveError(f"A queue in the job's store has something ({name!r:.100}).")
        if store.check([name]):
            found[raw] = store.get(name)
    return found


def fill(host: str, port: int, content: Mapping[bytes, bytes]) -> None:
    """Put that into a new store. Raises RuntimeError (torch's)."""
    store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False)
    for raw, value in content.items():
        store.set(_name(raw), value)


def empty(host: str, port: int, keys: Iterable[bytes]) -> None:
    """Take them away again. Raises RuntimeError (torch's)."""
    store: Any = TCPStore(host, port, is_master=False, wait_for_workers=False)
    for raw in keys:
        store.delete_key(_name(raw))
