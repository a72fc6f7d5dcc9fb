"""Makes the processes of a snapshot again, whose numbers are free by now, for another start of the ranks."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jitckpt.agent.migration import looked_at, snapshots
from jitckpt.agent.migration.move import ATTEMPTS, LIMIT, end_what_is_left, inherited_outputs, lifeline_of
from jitckpt.agent.migration.shelf import DamagedSnapshot, ProcessSnapshot, images_of
from jitckpt.agent.migration.store_relay import StoreRelay
from jitckpt.agent.migration.suspending import SLOWEST_DISK
from jitckpt.agent.processes import children
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import Proxies
from jitckpt.agent.proxies.step_barrier import StepBarrier
from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, CriuError, Options
from jitckpt.errors import JitckptError
from jitckpt.ring import local_state
from jitckpt.system import network_lock, process_tree
from jitckpt.system.resting_place import RestingPlace
from jitckpt.wire import environment
from jitckpt.wire.checked import ProtocolError, part_of
from jitckpt.wire.moves import DumpedRank

FREE_SECONDS = 10.0  # in which the numbers of those that were ended become free


class NotMadeAgain(JitckptError):
    """A snapshot can't be gone back to, and nothing of it is left; the text is a sentence."""


@dataclass
class _Rank:
    """ends: our sockets to it, by name."""

    dumped: DumpedRank
    ring: int
    ends: dict[str, socket.socket] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.dumped.rank

    @property
    def pid(self) -> int:
        return self.dumped.pid


@dataclass(frozen=True)
class MadeAgain:
    """All ranks as they were after `step`, where they rest, and what they share with this process."""

    step: int
    plan: Mapping[str, Any]
    ranks: Sequence[_Rank]
    relay: StoreRelay
    barrier: StepBarrier | None
    resting_place: RestingPlace

    def worker(self, local_rank: int, kept: Children) -> Worker:
        """Return one of them."""
        one = self.ranks[local_rank]
        return Worker.adopted(
            one.rank,
            one.pid,
            own=one.ends["agent"],
            copies=None,
            ring_fd=one.ring,
            lifeline=lifeline_of(one.pid),
            children=kept,
        )

    def adopt(self, proxies: Proxies) -> None:
        """Have all go on once they are watched."""
        for one in self.ranks:
            proxies.adopt(one.rank, one.ends["control"])
            for name, process, ended in one.dumped.askers:
                proxies.servers.adopt(one.rank, one.ends[name], process, dict(ended))
            for name, said in one.dumped.conversations.items():
                self.relay.take_over(one.ends[name], bytes.fromhex(said))
                self.relay.go_on([one.ends[name]])
        proxies.go_on_from(self.plan["rest"])

    def variables(self, rank: int) -> dict[str, str]:
        """Return what is another for a rank's server than its worker was told."""
        local_rank = next(number for number, one in enumerate(self.ranks) if one.rank == rank)
        together = {} if self.barrier is None else environment.PROXY_TOGETHER.to(self.barrier.of(local_rank))
        return {**together, **environment.AGENT_PID.to(os.getpid())}


def made_again(
    found: Criu, snapshot: ProcessSnapshot, store: tuple[str, int], fired: Sequence[str], mark: str
) -> MadeAgain:
    """Make all processes of a snapshot again. store: a new one, for their job. mark: for CRIU's own.

    fired: rehearsed failures that have happened by now. Raises NotMadeAgain.
    """
    with contextlib.ExitStack() as images, contextlib.ExitStack() as undo:
        try:
            plan, folders = images.enter_context(images_of(snapshot))
            told = [part_of(DumpedRank, one, "rank of a snapshot") for one in plan["ranks"]]
        except (DamagedSnapshot, ProtocolError) as error:
            raise NotMadeAgain(str(error)) from error
        ranks = [_Rank(one, local_state.create()) for one in told]
        undo.callback(_undo, ranks)
        try:
            _wait_until_free([number for folder in folders.values() for number in criu.numbers(folder)])
            content = {bytes.fromhex(k): bytes.fromhex(v) for k, v in plan["store"].items()}
            undo.callback(snapshots.empty, *store, content)
            snapshots.fill(*store, content)
            relay = StoreRelay(*store, plan["relay"])
            undo.callback(relay.close)
            place = RestingPlace(len(ranks))
            undo.callback(place.close)
            place.go_on_from(plan["steps"], fired)
            barrier = None
            if plan["barrier"]:
                barrier = StepBarrier(len(ranks))
                undo.callback(barrier.close)
                barrier.fill(bytes.fromhex(plan["barrier"]))
            shared = {"jitckpt-rest": place.file}
            shared |= {} if barrier is None else {"jitckpt-steps": barrier.file}
            for one in ranks:
                _make_again(found, folders[one.rank], one, shared, mark)
        except (CriuError, OSError, RuntimeError) as error:  # RuntimeError: torch's store
            raise NotMadeAgain(str(error)) from error
        undo.pop_all()
    return MadeAgain(snapshot.step, plan, ranks, relay, barrier, place)


def _undo(ranks: Sequence[_Rank]) -> None:
    for one in ranks:
        end_what_is_left(one.dumped.pids)
        children.waited_for(one.pid)
        for end in one.ends.values():
            end.close()
        os.close(one.ring)


def _wait_until_free(numbers: Sequence[int]) -> None:
    """Wait for the ends of those that had the numbers. Raises OSError if somebody else has one."""
    until = time.monotonic() + FREE_SECONDS
    while taken := next((number for number in numbers if looked_at.name_of(number)), None):
        if time.monotonic() > until:
            raise OSError(
                f"there is a process {taken} ({looked_at.name_of(taken)}), a number that one of its "
                "processes has to have again"
            )
        time.sleep(0.01)


def _make_again(found: Criu, images: int, one: _Rank, shared: Mapping[str, int], mark: str) -> None:
    """Make a rank's processes again. Raises CriuError or OSError; then some of them may be left."""
    dumped = one.dumped
    for folder in dumped.folders:
        os.makedirs(folder, exist_ok=True)
    for path, size in dumped.files.items():
        if os.stat(path).st_size > size:  # what was written since then is written again
            os.truncate(path, size)
    memory = {"jitckpt-local-state": one.ring, **shared}
    size = sum(os.stat(name, dir_fd=images).st_size for name in os.listdir(images))
    variables = {process_tree.MARK: mark}
    children.note_own(one.pid)
    try:
        for attempt in range(1, ATTEMPTS + 1):
            with contextlib.ExitStack() as stack:
                inherit = list(inherited_outputs(dumped.outputs, stack))
                inherit += [(memory[name], f"/memfd:{name}") for name in dumped.memory if name in memory]
                for inode, kind, name in dumped.sockets:
                    one.ends[name], theirs = socket.socketpair(socket.AF_UNIX, kind)
                    stack.callback(theirs.close)
                    inherit.append((theirs.fileno(), f"socket:[{inode}]"))
                    for data in dumped.said.get(name, []):
                        theirs.send(bytes.fromhex(data))
                limit = LIMIT + size / SLOWEST_DISK
                try:
                    criu.restore(found, Options(images, limit, inherit=inherit, variables=variables))
                    return
                except CriuError:
                    end_what_is_left(dumped.pids)
                    if attempt == ATTEMPTS:
                        raise
    finally:
        network_lock.unlock(criu.locks(images))
