"""Parts of shards on their way to other hosts, and back: more of what an agent's visit may ask.

As in peers.py: messages first, then native/memory_tier has the connection, and checks each chunk. Chunks go a
few at a time, so that nobody needs memory for more than these beside what the part itself takes.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from jitckpt._memory_tier import Pace
from jitckpt.errors import SaveError
from jitckpt.hosts import visiting
from jitckpt.tiers import chunks, peers, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.part_store import PartStore, few, of_part, scratch
from jitckpt.tiers.parts import HeldParts
from jitckpt.tiers.peers import ANSWER_SECONDS, PeerMemory, handed_over
from jitckpt.tiers.shard import ShardPart
from jitckpt.tiers.tier import Shard
from jitckpt.wire import visits
from jitckpt.wire.visits import Go, IndexComes, PutPart, There, VisitDone, WantPart, WantParts


class PeerParts(PeerMemory):
    """The parts of shards that one other host keeps."""

    def put_part(self, one: Shard, *, in_directory: bool) -> None:
        asyncio.run(self._put_part(one, in_directory))

    def parts(self) -> HeldParts:
        """Return what is in its memory, and what in its directory."""
        return asyncio.run(self._parts())

    def part(self, rank: int, step: int, timeline: str, *, in_directory: bool) -> tuple[int, ShardPart]:
        """Return the slot of a part, and what it has of the shard."""
        return asyncio.run(self._get_part(WantPart(rank, step, timeline, in_directory, False), None, ()))

    def part_into(
        self,
        rank: int,
        step: int,
        timeline: str,
        window: Window,
        digests: Sequence[bytes],
        *,
        in_directory: bool,
    ) -> None:
        """Bring a part's chunks, which have these checksums, into a window."""
        wanted = WantPart(rank, step, timeline, in_directory, True)
        asyncio.run(self._get_part(wanted, window, digests))

    async def _put_part(self, one: Shard, in_directory: bool) -> None:
        async with self._visit() as (reader, writer):
            await self._send(writer, PutPart(one.rank, one.slot, one.seal.encode().hex(), in_directory))
            await self._send(writer, IndexComes(), one.index)
            await self._answer(reader, Go)
            index = shard.parse_index(one.index, one.seal)
            with chunks.of(index, self._hosts.name(self._host)), handed_over(writer) as socket:
                for first, count in few(len(index.checksums)):
                    window, digests = one.window.part(first, count), index.digests[first : first + count]
                    chunks.send(socket, window, digests, self._pace, self._patience, self._stop)
            await self._answer(reader, VisitDone)

    async def _parts(self) -> HeldParts:
        async with self._visit() as (reader, writer):
            await self._send(writer, WantParts())
            said, _ = await self._answer(reader, visits.Parts)
        return said.in_memory, said.in_directory

    async def _get_part(
        self, wanted: WantPart, window: Window | None, digests: Sequence[bytes]
    ) -> tuple[int, ShardPart]:
        async with self._visit() as (reader, writer):
            await self._send(writer, wanted)
            there, encoded = await self._answer(reader, There)
            slot, seal = peers.slot_and_seal(there)
            index, part = of_part(encoded, seal)
            if window is not None:
                await self._send(writer, Go())
                with chunks.of(index, self._hosts.name(self._host)), handed_over(writer) as socket:
                    for first, count in few(len(digests)):
                        to, of = window.part(first, count), digests[first : first + count]
                        chunks.receive(socket, to, of, self._patience, self._stop)
        return slot, part


Stores = tuple[PartStore, PartStore | None]  # in memory, and in a directory


async def answer(
    stores: Stores,
    why_not: Callable[[int], str | None],
    arrived: Callable[[int, bool], None],
    request: visits.OfMemory,
    connection: peers.Connection,
) -> bool:
    """Do what another host asks of the parts that this one keeps (peers.More).

    why_not: says why nothing of a rank is taken in here, if so. arrived: hears of each that is new, and
    whether it is in the directory.
    """
    reader, writer = connection
    match request:
        case PutPart(rank):
            slot, seal = peers.slot_and_seal(request)
            _, encoded = await visiting.hear(reader, IndexComes)
            if (reason := why_not(rank)) is not None:
                raise SaveError(reason)
            await _take(_store(stores, request.in_directory), rank, (slot, seal, encoded), writer)
            await asyncio.to_thread(arrived, rank, request.in_directory)
            writer.write(visiting.encode(VisitDone()))
        case WantParts():
            held = [[] if store is None else await asyncio.to_thread(store.has) for store in stores]
            writer.write(visiting.encode(visits.Parts(*held)))
        case WantPart(rank, step, timeline):
            store = _store(stores, request.in_directory)
            slot, seal, encoded = await asyncio.to_thread(store.find, rank, step, timeline)
            writer.write(visiting.encode(There(seal.encode().hex(), slot), encoded))
            if request.all:
                await visiting.hear(reader, Go)
                await _give(store, shard.parse_index(encoded, seal), slot, seal.data_bytes, writer)
        case _:
            return False
    return True


def _store(stores: Stores, in_directory: bool) -> PartStore:
    found = stores[1] if in_directory else stores[0]
    if found is None:
        raise SaveError("This host has no directory for parts of states (--memory-spill).")
    return found


async def _take(
    store: PartStore, rank: int, said: tuple[int, shard.Seal, bytes], writer: asyncio.StreamWriter
) -> None:
    """Have a part come, a few chunks at a time."""
    with ExitStack() as stack:
        # What takes long is no matter for the loop, which others wait for.
        index, put = await asyncio.to_thread(stack.enter_context, store.coming(rank, *said))
        whole = said[1].data_bytes

        def receive(socket: int, stop: int) -> None:
            buffer: Window | None = None
            for first, count in few(len(index.checksums)):
                length = min(whole - first * shard.CHUNK, count * shard.CHUNK)
                buffer = window = buffer if buffer is not None and buffer.size == length else scratch(length)
                chunks.receive(socket, window, index.digests[first : first + count], ANSWER_SECONDS, stop)
                put(first, window)

        with chunks.of(index):
            await peers.beside(writer, receive, Go())


async def _give(
    store: PartStore, index: shard.Index, slot: int, size: int, writer: asyncio.StreamWriter
) -> None:
    def send(socket: int, stop: int) -> None:
        for first, count in few(len(index.checksums)):
            window = store.read(index.identity.rank, slot, first, count, size)
            chunks.send(socket, window, index.digests[first : first + count], Pace(), ANSWER_SECONDS, stop)

    with chunks.of(index):
        await peers.beside(writer, send)
