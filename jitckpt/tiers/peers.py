"""The tier in other hosts' memory, over the agents' authenticated connections: one visit for each shard.

Whoever has a shard sends its seal and its index; once the other side says that it has room, both hand the
connection to native/memory_tier, which sends the chunks, and checks each where it comes in. Neither side
touches a device, a collective or the training's interpreter.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from jitckpt._memory_tier import Pace
from jitckpt.errors import SaveError
from jitckpt.hosts import visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import alike, chunks, shard
from jitckpt.tiers.host_memory import SLOTS, HostMemory
from jitckpt.tiers.tier import Shard, Taker, Tier
from jitckpt.wire import visits
from jitckpt.wire.checked import Checked, Kind
from jitckpt.wire.visits import (
    Add,
    Go,
    Has,
    HeldShard,
    IndexComes,
    Put,
    PutPart,
    Refused,
    Remake,
    There,
    VisitDone,
    WantChunks,
    WantShard,
)

VISIT = "memory"  # what an agent says that comes for this
ANSWER_SECONDS = 30.0

MOST_TRANSFERS = 64  # that go on at a time, each on a thread that sleeps most of the time
_transfers = ThreadPoolExecutor(MOST_TRANSFERS, "jitckpt-memory-transfer")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Does what a visit asks for that this file does not know; returns whether it does.
More = Callable[[visits.OfMemory, Connection], Awaitable[bool]]


@dataclass(frozen=True)
class Given:
    """What had to be sent of a shard, and how long that took."""

    bytes: int
    seconds: float


class PeerMemory(Tier):
    """What one other host's memory has. A host that is lost, or says nonsense, is a LinkError."""

    def __init__(
        self,
        hosts: Hosts,
        host: int,
        patience: float = ANSWER_SECONDS,
        *,
        pace: Pace | None = None,
        stop: int = -1,
    ) -> None:
        """patience: seconds for each answer, and for anything at all to be taken or to come.

        pace: of what is put there; as fast as it goes if there is none. stop: an eventfd that ends it.
        """
        self._hosts, self._host, self._patience = hosts, host, patience
        self._pace, self._stop = Pace() if pace is None else pace, stop

    def put(self, shard: Shard) -> None:
        self.give(shard)

    def give(self, shard: Shard) -> Given:
        """Do as `put` does; return what had to be sent."""
        return asyncio.run(self._give(shard))

    def has(self) -> Sequence[HeldShard]:
        return asyncio.run(self._has())

    def get(self, rank: int, step: int, timeline: str, into: Taker) -> int:
        return asyncio.run(self._get(rank, step, timeline, into))

    def index(self, rank: int, step: int, timeline: str) -> tuple[int, shard.Seal, bytes]:
        """Return of a shard which slot is its, its seal, and its index."""
        return asyncio.run(self._index(rank, step, timeline))

    def chunks_into(self, index: shard.Index, wanted: range, to: chunks.Window) -> None:
        """Bring some chunks of a shard into this host's memory."""
        asyncio.run(self._chunks_into(index, wanted, to))

    def drop(self, rank: int, step: int) -> None:
        asyncio.run(self._drop(rank, step))

    def gathered(self) -> int | None:
        """Return which step the other host has got all that its ranks need of; 0: none, None: not yet."""
        return asyncio.run(self._gathered())

    def collected(self) -> bool:
        """Return whether the other host, which ends, has got what it needs of others."""
        return asyncio.run(self._collected())

    async def _give(self, one: Shard) -> Given:
        who = self._hosts.name(self._host)
        async with self._visit() as (reader, writer):
            await self._send(writer, Put(one.rank, one.slot, one.seal.encode().hex()))
            await self._send(writer, IndexComes(), one.index)
            there: list[range] = []
            while isinstance(said := (await self._answer(reader, Go, Has))[0], Has):
                there.append(range(said.first, said.first + said.count))
            index = shard.parse_index(one.index, one.seal)
            try:
                wanted = alike.missing(there, len(index.checksums))
            except ValueError as error:
                raise LinkError(f"{who} says what makes no sense: {error}.") from error
            begun, size = time.monotonic(), len(one.index)
            with handed_over(writer) as socket:
                for run in wanted:
                    window, digests = chunks.part_of(one.window, run), index.digests[run.start : run.stop]
                    with chunks.of(index, who, run.start):
                        chunks.send(socket, window, digests, self._pace, self._patience, self._stop)
                    size += window.size
            await self._answer(reader, VisitDone)
        return Given(size, time.monotonic() - begun)

    async def _has(self) -> Sequence[HeldShard]:
        async with self._visit() as (reader, writer):
            await self._send(writer, visits.WantHeld())
            said, _ = await self._answer(reader, visits.Shards)
        return said.there

    async def _get(self, rank: int, step: int, timeline: str, into: Taker) -> int:
        async with self._visit() as (reader, writer):
            await self._send(writer, WantShard(rank, step, timeline))
            there, encoded = await self._answer(reader, There)
            slot, seal = slot_and_seal(there)
            with (
                into.coming(rank, slot, seal, encoded) as (index, window),
                chunks.of(index, self._hosts.name(self._host)),
                handed_over(writer) as socket,
            ):
                await self._send(writer, Go())
                chunks.receive(socket, window, index.digests, self._patience, self._stop)
        return seal.size

    async def _index(self, rank: int, step: int, timeline: str) -> tuple[int, shard.Seal, bytes]:
        async with self._visit() as (reader, writer):
            await self._send(writer, WantShard(rank, step, timeline))
            there, encoded = await self._answer(reader, There)
        return *slot_and_seal(there), encoded

    async def _chunks_into(self, index: shard.Index, wanted: range, to: chunks.Window) -> None:
        async with self._visit() as (reader, writer):
            await self._want_chunks(reader, writer, index, wanted)
            digests = index.digests[wanted.start : wanted.stop]
            who = self._hosts.name(self._host)
            with chunks.of(index, who, wanted.start), handed_over(writer) as socket:
                chunks.receive(socket, to, digests, self._patience, self._stop)

    async def _want_chunks(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: shard.Index, wanted: range
    ) -> None:
        """Have chunks of a shard come on this connection."""
        rank, step, timeline = index.identity.rank, index.step, index.timeline
        await self._send(writer, WantChunks(rank, step, timeline, wanted.start, len(wanted)))
        await self._answer(reader, VisitDone)
        await self._send(writer, Go())

    async def _drop(self, rank: int, step: int) -> None:
        async with self._visit() as (reader, writer):
            await self._send(writer, visits.Drop(rank, step))
            await self._answer(reader, VisitDone)

    async def _gathered(self) -> int | None:
        async with self._visit() as (reader, writer):
            await self._send(writer, visits.WantGathered())
            return (await self._answer(reader, visits.Gathered))[0].step

    async def _collected(self) -> bool:
        async with self._visit() as (reader, writer):
            await self._send(writer, visits.WantCollected())
            return (await self._answer(reader, visits.Collected))[0].all

    @asynccontextmanager
    async def _visit(self) -> AsyncIterator[Connection]:
        try:
            async with self._hosts.visit(self._host, VISIT, for_memory=True) as connection:
                yield connection
        except OSError as error:
            raise LinkError(f"{self._hosts.name(self._host)} can't be reached: {error}.") from error

    async def _send(self, writer: asyncio.StreamWriter, message: Checked, data: bytes = b"") -> None:
        writer.write(visiting.encode(message, data))
        try:
            async with asyncio.timeout(self._patience):
                await writer.drain()
        except TimeoutError as error:
            raise LinkError(f"{self._hosts.name(self._host)} takes nothing more.") from error

    async def _answer(self, reader: asyncio.StreamReader, *kinds: type[Kind]) -> tuple[Kind, bytes]:
        who = self._hosts.name(self._host)
        try:
            return await visiting.answer(reader, who, self._patience, *kinds)
        except visiting.RefusedError as error:
            raise SaveError(f"{who} says: {error}") from error


async def serve(
    memory: HostMemory,
    may_put: Callable[[int], str | None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    more: More | None = None,
    own: Collection[int] = (),
) -> None:
    """Do what another host asks of this one's memory, and answer. Raises LinkError at the visit's end.

    may_put: says why nothing of a rank is taken in here, if so. own: ranks of which other hosts' ranks may
    hold something, too, that need not come then.
    """
    try:
        request, _ = await visiting.hear(reader, *visits.OF_MEMORY)
        match request:
            case Put(rank):
                slot, seal = slot_and_seal(request)
                _, encoded = await visiting.hear(reader, IndexComes)
                if (reason := may_put(rank)) is not None:
                    raise SaveError(reason)
                await _take(memory, own, memory.coming(rank, slot, seal, encoded), writer)
                writer.write(visiting.encode(VisitDone()))
            case visits.WantHeld():
                held = await asyncio.to_thread(memory.has)
                writer.write(visiting.encode(visits.Shards(list(held))))
            case WantShard(rank, step, timeline):
                one = await asyncio.to_thread(memory.shard, rank, step, timeline)
                index = shard.parse_index(one.index, one.seal)
                writer.write(visiting.encode(There(one.seal.encode().hex(), one.slot), one.index))
                await visiting.hear(reader, Go)
                with chunks.of(index):
                    await give(writer, one.window, index.digests)
                return
            case WantChunks(rank, step, timeline, first, count):
                one = await asyncio.to_thread(memory.shard, rank, step, timeline)
                index = shard.parse_index(one.index, one.seal)
                part = chunks.part_of(one.window, range(first, first + count))
                writer.write(visiting.encode(VisitDone()))
                await visiting.hear(reader, Go)
                with chunks.of(index, first=first):
                    await give(writer, part, index.digests[first : first + count])
                return
            case visits.Drop(rank, step):
                await asyncio.to_thread(memory.drop, rank, step)
                writer.write(visiting.encode(VisitDone()))
            case unknown:
                if more is None or not await more(unknown, (reader, writer)):
                    raise SaveError(f"Nobody knows what {unknown!r:.200} asks for.")
    except LinkError:
        raise
    except Exception as error:  # whatever it is: who asks is to hear of it
        writer.write(visiting.encode(Refused(str(error) or repr(error))))
    await writer.drain()


async def _take(
    memory: HostMemory,
    own: Collection[int],
    coming: AbstractContextManager[tuple[shard.Index, chunks.Window]],
    writer: asyncio.StreamWriter,
) -> None:
    """Have a shard come into memory."""
    with ExitStack() as stack:
        # What takes long is no matter for the loop, which others wait for.
        index, window = await asyncio.to_thread(stack.enter_context, coming)
        there: list[range] = []
        for run in await alike.find(memory, own, index):
            if await asyncio.to_thread(alike.copied, run, index, window):
                there.append(run.chunks)
                writer.write(visiting.encode(Has(run.chunks.start, len(run.chunks))))
                await writer.drain()
        wanted = alike.missing(there, len(index.checksums))

        def receive(socket: int, stop: int) -> None:
            for run in wanted:
                part, digests = chunks.part_of(window, run), index.digests[run.start : run.stop]
                with chunks.of(index, first=run.start):
                    chunks.receive(socket, part, digests, ANSWER_SECONDS, stop)

        await beside(writer, receive, Go())


async def give(writer: asyncio.StreamWriter, window: chunks.Window, digests: Sequence[bytes]) -> None:
    """Send chunks, as fast as it goes: who asks for them has nothing to train with."""

    def send(socket: int, stop: int) -> None:
        chunks.send(socket, window, digests, Pace(), ANSWER_SECONDS, stop)

    await beside(writer, send)


@contextmanager
def handed_over(writer: asyncio.StreamWriter) -> Iterator[int]:
    """Give the connection away: what comes meanwhile is for whoever has the descriptor."""
    transport = writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    descriptor = os.dup(writer.get_extra_info("socket").fileno())  # the connection may be closed meanwhile
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        if not writer.is_closing():
            transport.resume_reading()


async def beside(
    writer: asyncio.StreamWriter, call: Callable[[int, int], None], first: Go | None = None
) -> None:
    """Have a thread call with the connection, and an eventfd that ends it; first: what is said before."""
    stop = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        with handed_over(writer) as socket:
            if first is not None:
                writer.write(visiting.encode(first))
            running = asyncio.get_running_loop().run_in_executor(_transfers, call, socket, stop)
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                os.eventfd_write(stop, 1)
                await asyncio.wait([running])
                raise
    finally:
        os.close(stop)


def slot_and_seal(said: Put | PutPart | Add | Remake | There) -> tuple[int, shard.Seal]:
    """Return what a message says of a shard. Raises SaveError for nonsense."""
    try:
        seal = shard.parse_seal(bytes.fromhex(said.seal))
    except ValueError as error:
        raise SaveError(f"A shard came without its seal: {error!r:.100}.") from error
    if seal is None or said.slot not in SLOTS:
        raise SaveError("A shard came with a damaged seal, or for no slot.")
    return said.slot, seal
