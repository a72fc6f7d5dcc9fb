"""Makes the processes of a snapshot again, whose numbers are free by now, for another start of the ranks."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitckpt.agent.migration import looked_at, side_by_side, snapshots
from jitckpt.agent.migration.move import LIMIT
from jitckpt.agent.migration.rank_from_images import RankFromImages
from jitckpt.agent.migration.shelf import DamagedSnapshot, ProcessSnapshot, images_of
from jitckpt.agent.migration.store_relay import StoreRelay
from jitckpt.agent.migration.suspending import SLOWEST_DISK
from jitckpt.agent.processes.children import Children
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import Proxies
from jitckpt.agent.proxies.step_barrier import StepBarrier
from jitckpt.bindings import criu
from jitckpt.bindings.criu import Criu, CriuError
from jitckpt.errors import JitckptError
from jitckpt.ring import local_state
from jitckpt.system import network_lock
from jitckpt.system.resting_place import RestingPlace
from jitckpt.wire import environment
from jitckpt.wire.checked import ProtocolError, part_of
from jitckpt.wire.moves import DumpedRank

FREE_SECONDS = 10.0  # in which the numbers of those that were ended become free


class NotMadeAgain(JitckptError):
    """A snapshot can't be gone back to, and nothing of it is left; the text is a sentence."""


@dataclass(frozen=True)
class MadeAgain:
    """All ranks as they were after `step`, where they rest, and what they share with this process."""

    step: int
    plan: Mapping[str, Any]
    ranks: Sequence[RankFromImages]
    relay: StoreRelay
    barrier: StepBarrier | None
    resting_place: RestingPlace
    undo: Callable[[], None]  # ends the processes, before anybody has adopted them

    def worker(self, local_rank: int, kept: Children) -> Worker:
        """Return one of them."""
        return self.ranks[local_rank].worker(kept)

    def adopt(self, proxies: Proxies) -> None:
        """Have all go on once they are watched."""
        for one in self.ranks:
            one.adopt(proxies, self.relay)
        if self.plan["rest"]:  # on the first host
            proxies.go_on_from(self.plan["rest"])

    def variables(self, rank: int) -> dict[str, str]:
        """Return what is another for a rank's server than its worker was told."""
        local_rank = next(number for number, one in enumerate(self.ranks) if one.rank == rank)
        together = {} if self.barrier is None else environment.PROXY_TOGETHER.to(self.barrier.of(local_rank))
        return {**together, **environment.AGENT_PID.to(os.getpid())}


def made_again(
    found: Criu,
    snapshot: ProcessSnapshot,
    store: tuple[str, int],
    fired: Sequence[str],
    *,
    mark: str,
    hosts: int,
) -> MadeAgain:
    """Make this host's processes of a snapshot again. store: a new one, for their job. mark: for CRIU's own.

    fired: rehearsed failures that have happened by now. hosts: of the job. Raises NotMadeAgain.
    """
    with contextlib.ExitStack() as images, contextlib.ExitStack() as undo:
        try:
            plan, folders = images.enter_context(images_of(snapshot))
            told = [part_of(DumpedRank, one, "rank of a snapshot") for one in plan["ranks"]]
        except (DamagedSnapshot, ProtocolError) as error:
            raise NotMadeAgain(str(error)) from error
        ranks = [RankFromImages(one, folders[one.rank], local_state.create()) for one in told]
        undo.callback(_undo, ranks)
        try:
            _wait_until_free([number for folder in folders.values() for number in criu.numbers(folder)])
            if content := {bytes.fromhex(k): bytes.fromhex(v) for k, v in plan["store"].items()}:
                undo.callback(snapshots.empty, *store, content)
                snapshots.fill(*store, content)
            relay = StoreRelay(*store, plan["relay"])
            undo.callback(relay.close)
            place = RestingPlace(len(ranks))
            undo.callback(place.close)
            place.go_on_from(plan["steps"], fired)
            barrier = None
            if plan["barrier"]:
                barrier = StepBarrier(len(ranks), hosts)
                undo.callback(barrier.close)
                barrier.fill(bytes.fromhex(plan["barrier"]))
            shared = {"jitckpt-rest": place.file}
            shared |= {} if barrier is None else {"jitckpt-steps": barrier.file}
            _make_all_again(found, ranks, shared, mark)
        except (CriuError, OSError, RuntimeError) as error:  # RuntimeError: torch's store
            raise NotMadeAgain(str(error)) from error
        return MadeAgain(snapshot.step, plan, ranks, relay, barrier, place, undo.pop_all().close)


def _undo(ranks: Sequence[RankFromImages]) -> None:
    for one in ranks:
        one.end()
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


def _make_all_again(
    found: Criu, ranks: Sequence[RankFromImages], shared: Mapping[str, int], mark: str
) -> None:
    """Make the ranks' processes again. Raises CriuError or OSError; then some of them may be left."""
    size = 0
    for one in ranks:
        for path, length in one.dumped.files.items():
            if os.stat(path).st_size > length:  # what was written since then is written again
                os.truncate(path, length)
        size += sum(os.stat(name, dir_fd=one.images).st_size for name in os.listdir(one.images))
    limit = LIMIT + size / SLOWEST_DISK
    try:
        side_by_side.all_of(
            side_by_side.made_again(
                ranks, lambda one: one.restore(found, limit, shared, mark), lambda one: one.end()
            )
        )
    finally:
        for one in ranks:
            network_lock.unlock(criu.locks(one.images))
