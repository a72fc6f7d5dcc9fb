"""All ranks of this host go on on another one, which stands by: dumped here, made again there.

The host that stands by makes the processes again first, while the others notice nothing; then the other hosts
are told, in order with all else that is said between them, and it comes in this one's place.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.image_transfer import send_file
from jitckpt.agent.migration.move import Dumped, MoveError, Mover, peeked, reap
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.same_pages import SamePages
from jitckpt.agent.migration.side_by_side import all_of
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.proxies.step_barrier import Messenger, StepBarrier, told_of
from jitckpt.bindings import criu
from jitckpt.bindings.criu import CriuError
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.console import say, show_size
from jitckpt.decisions.recovery import Rank
from jitckpt.errors import HostsError
from jitckpt.events import EventLog
from jitckpt.hosts import link, visiting
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.standbys import Standby
from jitckpt.hosts.visiting import RefusedError
from jitckpt.system import network_lock
from jitckpt.wire import agents
from jitckpt.wire.agents import ProxyOrder
from jitckpt.wire.checked import Kind
from jitckpt.wire.moves import (
    DumpedRank,
    HandOver,
    JobFacts,
    Move,
    RanksRestored,
    Taken,
    Unheard,
    Whole,
)

ANSWER_SECONDS = 240.0  # in which the other host makes a rank's processes again, at its second try, too
TAKING_SECONDS = 60.0  # in which it takes a piece of an image
HEARING_SECONDS = 30.0  # in which all other hosts say their last to this one
CONNECTING_SECONDS = 5.0
LOOK_SECONDS = 0.5  # between two looks who stands by
TRIES = 2  # hosts that stand by, of which each has got the images
LEADER = 0


@dataclass(frozen=True)
class _Sent:
    """To which host the images went, the connection to it, their bytes, and what it said."""

    standby: Standby
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    size: int
    restored: RanksRestored


class Departure:
    """Of this host's ranks. Used by the supervisor's thread."""

    def __init__(
        self,
        mover: Mover,
        hosts: Hosts,
        log: EventLog,
        say: Callable[[str], None],
        *,
        standbys: Callable[[], list[Standby]],
        facts: JobFacts,
        barrier: StepBarrier | None,
        messenger: Messenger | None,
        secret: bytes,
        wait: float,
        is_interrupted: Callable[[], bool],
        known: Callable[[], Sequence[Rank]],
    ) -> None:
        """standbys: who stands by now. secret: that the user gave to all hosts. known: all ranks.

        wait: seconds in which somebody may come to stand by. is_interrupted: whether the job was told to end.
        """
        self._mover, self._hosts, self._log, self._say = mover, hosts, log, say
        self._standbys, self._facts, self._secret = standbys, facts, secret
        self._barrier, self._messenger = barrier, messenger
        self._wait, self._is_interrupted, self._known = wait, is_interrupted, known
        self._until: float | None = None  # somebody may come
        self._handed_over = False

    def is_possible(self) -> bool:
        """Return whether there is a host to go to. If there is none it waits for one, but once only."""
        if self._hosts.index == LEADER:
            return False
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._wait
            if self._wait and not self._standbys():
                self._say(f"no host stands by: all ranks are held until one does, for {self._wait:g} s.")
        while not (there := bool(self._standbys())) and now < self._until and not self._is_interrupted():
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
        return there

    def leave(self, orders: Mapping[int, bytes]) -> bool:
        """Have all ranks go on on a host that stands by, with these orders; return whether they do."""
        begun = time.monotonic()
        folders: list[int] = []
        with contextlib.ExitStack() as stack:
            ready: list[Dumped] = []
            dumped: list[Dumped] = []
            stack.enter_context(self._mover.worker(min(orders)).being_made_again())
            try:
                for rank in orders:
                    folders.append(stack.enter_context(nameless_folder()))
                    ready.append(self._mover.prepared(rank, folders[-1], stack, elsewhere=True))
                found = self._mover.dump_all(ready)
                dumped += [one for one in found if isinstance(one, Dumped)]
                all_of(found)
                size, where = self._move(dumped, orders, time.monotonic() - begun)
            except (MoveError, CriuError, StoreError, LinkError, HostsError, OSError) as error:
                self._log.write("move_failed", ranks=sorted(orders), text=str(error))
                self._say(f"the ranks of this host were not moved to another one: {error}")
                if self._handed_over:
                    self._lose(dumped)
                else:
                    self._back(dumped)
                _unlock(folders)
                return False
            _unlock(folders)
            for one in dumped:
                reap(one.pids)
            seconds = time.monotonic() - begun
        self._say(
            f"ranks {', '.join(map(str, sorted(orders)))} go on on {where}: {show_size(size)} of processes "
            f"in {seconds:.2f} s."
        )
        return True

    def _back(self, dumped: Sequence[Dumped]) -> None:
        """Make the processes again here, as far as that can be done."""
        for one in dumped:
            reap(one.pids)
        for rank, took in self._mover.restore(dumped).items():
            if not isinstance(took, float):
                self._say(f"rank {rank} could not be made again: {took}")

    def _lose(self, dumped: Sequence[Dumped]) -> None:
        """The others expect them on the other host, so they are not made again here: they count as killed."""
        for one in dumped:
            reap(one.pids)
            self._mover.worker(one.rank).not_made_again()

    def _move(
        self, dumped: Sequence[Dumped], orders: Mapping[int, bytes], dump_seconds: float
    ) -> tuple[int, str]:
        """Return the bytes that were sent, and to whom."""
        move = Move(
            self._facts,
            self._hosts.index,
            [replace(host, pasts=()) for host in self._hosts.all],
            self._hosts.secret.hex(),
            self._mover.relay.name,
            time.monotonic(),
            [self._told_of(one) for one in dumped],
        )
        begun = time.monotonic()
        # Whatever is waited for there has a limit of its own.
        sent = self._hosts.start(self._send_to_one(move, dumped, self._standbys())).result()
        transfer = time.monotonic() - begun - sent.restored.seconds
        own = self._hosts.all[self._hosts.index]
        self._handed_over = True  # from here on the others expect that one, and no other
        if not self._hosts.hand_over(
            replace(own, address=sent.standby.address, port=sent.restored.port), HEARING_SECONDS
        ):
            raise MoveError(f"Not all hosts have answered within {HEARING_SECONDS:g} s.")
        said = [Arrived(LEADER, ProxyOrder(rank), order) for rank, order in orders.items()]
        taken = self._hosts.take()
        said += [one for one in taken if isinstance(one, Arrived)]
        steps = None if self._messenger is None else self._messenger.known
        ranks = self._known()
        hand_over = HandOver(
            "" if self._barrier is None else self._barrier.content.hex(),
            None if steps is None else told_of(steps),
            [Unheard(one.host, agents.encode(one.message), one.data.hex()) for one in said],
            [one.rank for one in ranks if one.finished],
            [(one.rank, one.exit_code, one.told) for one in ranks if one.exit_code is not None],
            sent.size,
            dump_seconds,
            transfer,
            sent.restored.seconds,
        )
        try:
            self._hosts.start(self._finish(sent.reader, sent.writer, hand_over)).result()
        except BaseException:
            self._hosts.give_back(taken)  # else this host would not know who is lost, and wait for ever
            raise
        return sent.size, sent.standby.address

    def _told_of(self, one: Dumped) -> DumpedRank:
        sockets = {**self._mover.sockets(one.rank), **one.stores}
        said = {name: peeked(end) for name, end in sockets.items()}  # they may yet go on here
        told = self._mover.told_of(one.rank, one.pids, one.what, stores=one.stores, said=said, files={})
        return replace(told, own_clock=one.keeps_clock)

    async def _send_to_one(
        self, move: Move, dumped: Sequence[Dumped], standbys: Sequence[Standby], tries: int = TRIES
    ) -> _Sent:
        """Have the first host that stands by and can be reached make the processes again.

        If it can't, it is the next one's turn, once. Raises LinkError or OSError.
        """
        standby, reader, writer = await self._connected(standbys)
        others = standbys[standbys.index(standby) + 1 :]
        try:
            size, restored = await self._send(reader, writer, move, dumped, standby)
        except (LinkError, OSError) as error:
            writer.close()  # what it may have made is ended there
            if tries == 1 or not others:
                raise
            self._say(f"{standby.address} could not take this host's ranks, so another is asked: {error}")
            return await self._send_to_one(move, dumped, others, tries - 1)
        return _Sent(standby, reader, writer, size, restored)

    async def _connected(
        self, standbys: Sequence[Standby]
    ) -> tuple[Standby, asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the first host that stands by and can be reached: of some nothing but the word is left."""
        reasons = []
        for standby in standbys:
            try:
                async with asyncio.timeout(CONNECTING_SECONDS):
                    reader, writer = await asyncio.open_connection(standby.address, standby.port)
                    await link.introduce(reader, writer, self._secret)
                return standby, reader, writer
            except (OSError, LinkError) as error:
                reasons.append(f"{standby.address}: {str(error) or 'no answer'}")
        raise LinkError(f"No host that stands by can be reached ({'; '.join(reasons)}).")

    async def _send(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        move: Move,
        dumped: Sequence[Dumped],
        standby: Standby,
    ) -> tuple[int, RanksRestored]:
        writer.write(visiting.encode(replace(move, clock=time.monotonic())))
        packer, same = Packer(standby.unpacks and packing.can_pack()), SamePages()
        size = 0
        for one in dumped:
            files = {
                name: os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=one.folder)
                for name in sorted(os.listdir(one.folder))
                if not name.endswith(".log")
            }
            try:
                for name, file in files.items():
                    size += await send_file(
                        writer, one.rank, name, file, packer, patience=TAKING_SECONDS, same=same
                    )
            finally:
                for file in files.values():
                    os.close(file)
            ring = self._mover.worker(one.rank).ring_fd
            size += await send_file(writer, one.rank, "", ring, packer, patience=TAKING_SECONDS)
        writer.write(visiting.encode(Whole()))
        say(f"{show_size(size - same.saved)} of {show_size(size)} had to go; the rest are the same pages.")
        if packer.saved:
            say(f"zstd has taken {show_size(packer.saved)} of that off the way.")
        return size, await _answer(reader, RanksRestored, ANSWER_SECONDS * len(dumped))

    async def _finish(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: HandOver
    ) -> None:
        writer.write(visiting.encode(last))
        try:
            await _answer(reader, Taken, ANSWER_SECONDS)
        finally:
            writer.close()


def _unlock(folders: Sequence[int]) -> None:
    """Take away CRIU's locks on connections that were not made again."""
    for folder in folders:
        with contextlib.suppress(OSError):  # the network's tables went before
            network_lock.unlock(criu.locks(folder))


async def _answer(reader: asyncio.StreamReader, kind: type[Kind], patience: float) -> Kind:
    who = "The host that stands by"
    try:
        return (await visiting.answer(reader, who, patience, kind))[0]
    except RefusedError as error:
        raise LinkError(f"{who} says: {error}") from error
