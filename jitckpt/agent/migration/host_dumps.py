"""One host's part in a snapshot of a job's processes: can they be written, and how; on what step they wait.

Whoever calls this is the supervisor's thread.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.foretold import calls_init
from jitckpt.agent.migration.move import LIMIT, MoveError, Mover, peeked
from jitckpt.agent.migration.shelf import Draft, Shelf, Size
from jitckpt.agent.migration.side_by_side import all_of, side_by_side
from jitckpt.agent.migration.suspending import SLOWEST_DISK
from jitckpt.agent.proxies.step_barrier import StepBarrier
from jitckpt.bindings import criu
from jitckpt.console import show_size
from jitckpt.decisions.belongings import SERVER, Carried
from jitckpt.decisions.transparent import suspension
from jitckpt.events import EventLog
from jitckpt.system import network_lock
from jitckpt.system.resting_place import RestingPlace
from jitckpt.wire.moves import DumpedRank

ROOM = 2.5  # times the images, that are free where they are written to memory first
DUMPS = 4  # of a rank, of which one has to come between two words that it says; where CRIU tells no more
# What a rank has said that nobody has read, by the socket, and how long the files are that it writes.
Outside = tuple[dict[str, list[bytes]], dict[str, int]]


class HostDumps:
    """Of one start of this host's ranks. place: where they wait behind steps."""

    def __init__(
        self,
        mover: Mover,
        ranks: Sequence[int],
        shelf: Shelf,
        log: EventLog,
        *,
        place: RestingPlace,
        barrier: StepBarrier | None,
    ) -> None:
        self.mover, self.shelf, self.place = mover, shelf, place
        self._ranks, self._log, self._barrier = list(ranks), log, barrier
        self.bytes = 0  # that the newest needs, as far as it is known before
        self._draft: Draft | None = None
        self._held = contextlib.ExitStack()  # from the dump on until all hosts have theirs
        self._told: list[DumpedRank] = []

    @property
    def is_ready(self) -> bool:
        """Whether all ranks use their devices, and no snapshot is on its way to the disk."""
        mover = self.mover
        ready = mover.proxies.recovers and mover.proxies.all_connected and not self.shelf.is_busy
        return ready and not any(mover.worker(rank).has_ended(0) for rank in self._ranks)

    def why_never(self) -> str:
        """Return what can't be carried, as a sentence; "" if all can."""
        try:
            self._look()
        except (MoveError, OSError) as error:
            return str(error)
        return ""

    def why_no_room(self) -> str:
        """Return why there is no room for one, as the end of a sentence; "" if there is."""
        try:
            self.bytes = needed = sum(
                looked_at.image_bytes(self.mover.worker(rank).pid) for rank in self._ranks
            )
            free = self.shelf.free
        except OSError as error:
            return str(error)
        if suspension.lacks_room(needed, free):
            return f"it needs {show_size(needed)} beside the one before, and {show_size(free)} are free."
        return ""

    def dump(self, step: int) -> None:
        """Write all ranks' processes, which rest; they do not reach the job's store before `put` or `drop`.

        Raises MoveError, CriuError, StoreError or OSError; then nothing is left of it.
        """
        self.place.want(0)
        in_memory = looked_at.available_memory() > ROOM * self.bytes
        self._draft = draft = self.shelf.begin(step, in_memory=in_memory)
        mover, stack = self.mover, self._held
        try:
            stack.enter_context(mover.worker(self._ranks[0]).being_made_again())
            whats = self._look()
            stores = {rank: stack.enter_context(mover.store_at_rest(whats[rank])) for rank in self._ranks}
            dumps = [partial(self._dump_one, draft, rank, whats[rank], stores[rank]) for rank in self._ranks]
            self._told = all_of(side_by_side(dumps))
            _need_other_ends(whats)
        except BaseException:
            self.drop()
            raise

    def put(self, plan: Mapping[str, Any], done: Callable[[Size, OSError | None], None]) -> None:
        """Let the ranks go on, and have what was written put on the disk by another thread.

        plan: what all hosts have in common. done: see Shelf.put.
        """
        assert self._draft is not None
        draft, self._draft = self._draft, None
        own = {
            "step": draft.step,
            "relay": self.mover.relay.name,
            "barrier": "" if self._barrier is None else self._barrier.content.hex(),
            "steps": self.place.steps,
            "ranks": [asdict(one) for one in self._told],
        }
        self._held.close()
        self.shelf.put(draft, {**own, **plan}, done)

    def drop(self) -> None:
        """Let the ranks go on, without what was written, if something was."""
        self.place.want(0)
        self._held.close()
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.drop()

    def _look(self) -> dict[int, Carried]:
        """Return how the belongings of each rank's processes are carried. Raises MoveError or OSError."""
        if calls_init(self._log):
            raise MoveError("The script has called jitckpt.init, which makes saves of its own.")
        return {rank: self.mover.look(rank, elsewhere=True, into_memory=False) for rank in self._ranks}

    def _dump_one(
        self, draft: Draft, rank: int, what: Carried, stores: Mapping[str, socket.socket]
    ) -> DumpedRank:
        """Dump a rank so that nothing it has said or written is both in its image and not, or neither."""
        mover, folder = self.mover, draft.of(rank)
        worker = mover.worker(rank)
        sockets = {**mover.sockets(rank), **stores}
        if os.fstat(worker.ring_fd).st_size:
            raise MoveError("The script has called jitckpt.init, which makes saves of its own.")
        mover.wait_until_read(sockets)
        dump = partial(self._dump_running, rank, folder, what)
        if mover.tells_when_stopped:
            said, files = self._look_while_stopped(worker.pid, sockets, dump)
        else:
            again = partial(draft.again, rank)
            said, files = self._look_twice(rank, worker.pid, sockets, again, dump)
        return mover.told_of(rank, mover.pids(rank, folder), what, stores=stores, said=said, files=files)

    def _dump_running(
        self, rank: int, folder: int, what: Carried, while_stopped: Callable[[], None] | None = None
    ) -> None:
        limit = LIMIT + self.bytes / SLOWEST_DISK
        try:
            self.mover.dump(rank, folder, what, limit, leaves_running=True, while_stopped=while_stopped)
        finally:
            network_lock.unlock(criu.locks(folder))

    def _look_while_stopped(
        self, pid: int, sockets: Mapping[str, socket.socket], dump: Callable[[Callable[[], None]], None]
    ) -> Outside:
        """Dump a rank once, and return what is outside of it then."""
        found: list[Outside | MoveError | OSError] = []

        def look() -> None:
            try:
                found.append(self._outside(pid, sockets))
            except (MoveError, OSError) as error:
                found.append(error)

        dump(look)
        if not found:
            raise MoveError("criu has not told when its processes were stopped.")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _look_twice(
        self,
        rank: int,
        pid: int,
        sockets: Mapping[str, socket.socket],
        again: Callable[[], None],
        dump: Callable[[], None],
    ) -> Outside:
        """Dump a rank until what is outside of it is the same before and behind, and return that."""
        for _ in range(DUMPS):
            again()
            before = self._outside(pid, sockets)
            dump()
            if self._outside(pid, sockets) == before:
                return before
        raise MoveError(f"Rank {rank} says or writes something all the time, though it is held.")

    def _outside(self, pid: int, sockets: Mapping[str, socket.socket]) -> Outside:
        """Return what a rank has said that nobody has read, and how long the files are that it writes."""
        return {name: peeked(one) for name, one in sockets.items()}, looked_at.written_files(pid)


def _need_other_ends(whats: Mapping[int, Carried]) -> None:
    """Raise MoveError where the other end of a rank's socket is gone by now, as a device's server has ended.

    CRIU, which may have seen that, has then not left the socket to who restores it, and can't make it again.
    """
    sockets = looked_at.sockets()
    for rank, what in whats.items():
        for end in what.sockets:
            if end.inode not in sockets or sockets[end.inode].peer == 0:
                who = "A device's server" if end.name.startswith(SERVER) else "Who is at its other end"
                raise MoveError(f"{who} of rank {rank} has ended meanwhile ({end.name}).")
