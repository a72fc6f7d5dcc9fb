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
from typing import Any

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.image_transfer import send_file
from jitckpt.agent.migration.move import CLOCKS, MoveError, Mover, drained, reap
from jitckpt.agent.migration.packing import Packer
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.proxies.step_barrier import Messenger, StepBarrier, told_of
from jitckpt.bindings import criu
from jitckpt.bindings.criu import CriuError
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.console import say, show_size
from jitckpt.decisions.belongings import Carried
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

ANSWER_SECONDS = 120.0  # in which the other host makes the processes again
HEARING_SECONDS = 30.0  # in which all other hosts say their last to this one
CONNECTING_SECONDS = 5.0
PIECE_SECONDS = 60.0  # in which the other host takes a piece of an image; of all there may be any number
LEADER = 0


@dataclass(frozen=True)
class _Dumped:
    """A rank whose processes are images in this folder."""

    rank: int
    folder: int
    pids: Sequence[int]
    what: Carried
    stores: dict[str, Any]


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
    ) -> None:
        """standbys: who stands by now. secret: that the user gave to all hosts."""
        self._mover, self._hosts, self._log, self._say = mover, hosts, log, say
        self._standbys, self._facts, self._secret = standbys, facts, secret
        self._barrier, self._messenger = barrier, messenger
        self._handed_over = False

    def is_possible(self) -> bool:
        """Return whether there is a host to go to."""
        return self._hosts.index != LEADER and bool(self._standbys())

    def leave(self, orders: Mapping[int, bytes]) -> bool:
        """Have all ranks go on on a host that stands by, with these orders; return whether they do."""
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            dumped: list[_Dumped] = []
            try:
                for rank in orders:
                    dumped.append(self._dump(rank, stack))
                size, where = self._move(dumped, orders, time.monotonic() - begun)
            except (MoveError, CriuError, StoreError, LinkError, HostsError, OSError) as error:
                if self._handed_over:
                    raise
                self._log.write("move_failed", ranks=sorted(orders), text=str(error))
                self._say(f"the ranks of this host were not moved to another one: {error}")
                self._back(dumped)
                return False
            for one in dumped:
                network_lock.unlock(criu.locks(one.folder))
                reap(one.pids)
            seconds = time.monotonic() - begun
        self._say(
            f"ranks {', '.join(map(str, sorted(orders)))} go on on {where}: {show_size(size)} of processes "
            f"in {seconds:.2f} s."
        )
        return True

    def _dump(self, rank: int, stack: contextlib.ExitStack) -> _Dumped:
        mover = self._mover
        what = mover.look(rank, elsewhere=True)
        folder = stack.enter_context(nameless_folder())
        stores = stack.enter_context(mover.store_at_rest(what))
        stack.enter_context(mover.worker(rank).being_made_again())
        mover.wait_until_read({**mover.sockets(rank), **stores})
        mover.dump(rank, folder, what)
        return _Dumped(rank, folder, mover.pids(rank, folder), what, stores)

    def _back(self, dumped: Sequence[_Dumped]) -> None:
        """Make the processes again here, as far as that can be done."""
        for one in dumped:
            reap(one.pids)
            with contextlib.suppress(CriuError, OSError):  # then it counts as killed
                self._mover.restore(one.rank, one.folder, one.pids, one.what, one.stores)

    def _move(
        self, dumped: Sequence[_Dumped], orders: Mapping[int, bytes], dump_seconds: float
    ) -> tuple[int, str]:
        """Return the bytes that were sent, and to whom: the first that can be reached."""
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
        sent = self._hosts.start(self._send(move, dumped))
        standby, reader, writer, size, restored = sent.result()
        transfer = time.monotonic() - begun - restored.seconds
        own = self._hosts.all[self._hosts.index]
        self._handed_over = True  # from here on the others expect that one, and no other
        if not self._hosts.hand_over(
            replace(own, address=standby.address, port=restored.port), HEARING_SECONDS
        ):
            raise MoveError(f"Not all hosts have answered within {HEARING_SECONDS:g} s.")
        said = [Arrived(LEADER, ProxyOrder(rank), order) for rank, order in orders.items()]
        said += [one for one in self._hosts.take() if isinstance(one, Arrived)]
        known = None if self._messenger is None else self._messenger.known
        hand_over = HandOver(
            "" if self._barrier is None else self._barrier.content.hex(),
            None if known is None else told_of(known),
            [Unheard(one.host, agents.encode(one.message), one.data.hex()) for one in said],
            size,
            dump_seconds,
            transfer,
            restored.seconds,
        )
        self._hosts.start(self._finish(reader, writer, hand_over)).result(ANSWER_SECONDS)
        return size, standby.address

    def _told_of(self, one: _Dumped) -> DumpedRank:
        sockets = {**self._mover.sockets(one.rank), **one.stores}
        said = {name: drained(end) for name, end in sockets.items()}
        if any(message.files for messages in said.values() for message in messages):
            raise MoveError(f"Rank {one.rank} was just asking for a server.")
        texts = {name: [message.data for message in messages] for name, messages in said.items()}
        return self._mover.told_of(one.rank, one.pids, one.what, stores=one.stores, said=texts, files={})

    async def _connected(self) -> tuple[Standby, asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the first host that stands by and can be reached: of some nothing but the word is left."""
        reasons = []
        for standby in self._standbys():
            try:
                async with asyncio.timeout(CONNECTING_SECONDS):
                    reader, writer = await asyncio.open_connection(standby.address, standby.port)
                    await link.introduce(reader, writer, self._secret)
                return standby, reader, writer
            except (OSError, LinkError) as error:
                reasons.append(f"{standby.address}: {str(error) or 'no answer'}")
        raise LinkError(f"No host that stands by can be reached ({'; '.join(reasons)}).")

    async def _send(
        self, move: Move, dumped: Sequence[_Dumped]
    ) -> tuple[Standby, asyncio.StreamReader, asyncio.StreamWriter, int, RanksRestored]:
        standby, reader, writer = await self._connected()
        writer.write(visiting.encode(move))
        packer = Packer(standby.unpacks and packing.can_pack())
        size = 0
        for one in dumped:
            files = {
                name: os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=one.folder)
                for name in sorted(os.listdir(one.folder))
                if not name.endswith(".log") and name != CLOCKS
            }
            try:
                for name, file in files.items():
                    size += await send_file(writer, one.rank, name, file, packer, patience=PIECE_SECONDS)
            finally:
                for file in files.values():
                    os.close(file)
            ring = self._mover.worker(one.rank).ring_fd
            size += await send_file(writer, one.rank, "", ring, packer, patience=PIECE_SECONDS)
        writer.write(visiting.encode(Whole()))
        await writer.drain()
        if packer.saved:
            say(f"zstd has taken {show_size(packer.saved)} of {show_size(size)} off the way.")
        return standby, reader, writer, size, await _answer(reader, RanksRestored)

    async def _finish(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: HandOver
    ) -> None:
        writer.write(visiting.encode(last))
        await writer.drain()
        try:
            await _answer(reader, Taken)
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader, kind: type[Kind]) -> Kind:
    who = "The host that stands by"
    try:
        return (await visiting.answer(reader, who, ANSWER_SECONDS, kind))[0]
    except RefusedError as error:
        raise LinkError(f"{who} says: {error}") from error
