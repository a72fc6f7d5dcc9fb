"""Cells of shards on their way under other hosts' parities, and back: more of what an agent's visit may ask.

As in peers.py: messages first, then native/memory_tier has the connection, and checks each chunk.
"""

import asyncio
from collections.abc import Callable

from jitckpt.decisions.redundancy import LEAST_GROUP
from jitckpt.errors import SaveError
from jitckpt.hosts import visiting
from jitckpt.tiers import chunks, parity, peers, shard
from jitckpt.tiers.chunks import Sum, Window
from jitckpt.tiers.parity import (
    ParityIndex,
    ParityMember,
    ParityMemory,
    ParityPiece,
    Stripe,
    part_bytes,
)
from jitckpt.tiers.peers import ANSWER_SECONDS, PeerMemory, handed_over
from jitckpt.wire import visits
from jitckpt.wire.visits import Add, Go, HeldParity, IndexComes, There, VisitDone, WantParities, WantParity


class PeerParity(PeerMemory):
    """What one other host's memory has, parities and cells of shards, too."""

    def add(self, piece: ParityPiece, window: Window) -> None:
        """Send the cell of a shard that is to go under the other host's parity. window: the whole shard."""
        asyncio.run(self._add(piece, window))

    def parities(self) -> list[HeldParity]:
        return asyncio.run(self._parities())

    def parity_index(self, stripe: Stripe, step: int, timeline: str) -> ParityIndex:
        return asyncio.run(self._get_parity(stripe, step, timeline, 0, None))[0]

    def parity_into(
        self, stripe: Stripe, step: int, timeline: str, wanted: range, into: tuple[Sum, int, Window]
    ) -> int:
        """Add a parity's first chunks to a sum in this host's memory, as the piece of this number."""
        return asyncio.run(self._get_parity(stripe, step, timeline, wanted.stop, into))[1]

    def cells_into(self, index: shard.Index, size: int, wanted: range, into: tuple[Sum, int, Window]) -> int:
        """Add chunks of a shard, of so many bytes, to a sum in this host's memory."""
        asyncio.run(self._cells(index, size, wanted, into))
        return part_bytes(size, wanted)

    async def _add(self, piece: ParityPiece, window: Window) -> None:
        member, stripe = piece.member, piece.stripe
        async with self._visit() as (reader, writer):
            seal, group = member.seal.encode().hex(), list(stripe.group)
            under = (group, stripe.place, piece.keep, stripe.copies)
            await self._send(writer, Add(piece.rank, member.slot, seal, *under))
            await self._send(writer, IndexComes(), member.index)
            await self._answer(reader, Go)
            index = shard.parse_index(member.index, member.seal)
            wanted = stripe.cell_of(piece.rank, member.seal.data_bytes)
            cell, digests = chunks.part_of(window, wanted), index.digests[wanted.start : wanted.stop]
            with chunks.of(index, self._hosts.name(self._host)), handed_over(writer) as socket:
                chunks.send(socket, cell, digests, self._pace, self._patience, self._stop)
            await self._answer(reader, VisitDone)

    async def _parities(self) -> list[HeldParity]:
        async with self._visit() as (reader, writer):
            await self._send(writer, WantParities())
            said, _ = await self._answer(reader, visits.Parities)
        return said.there

    async def _get_parity(
        self, stripe: Stripe, step: int, timeline: str, count: int, into: tuple[Sum, int, Window] | None
    ) -> tuple[ParityIndex, int]:
        """Return the index, and the bytes that have come of the parity."""
        size = 0
        async with self._visit() as (reader, writer):
            wanted = WantParity(list(stripe.group), stripe.place, step, timeline, count, stripe.copies)
            await self._send(writer, wanted)
            there, encoded = await self._answer(reader, There)
            _, seal = peers.slot_and_seal(there)
            index = parity.parse_index(encoded, seal)
            if into is not None:
                sum_, number, to = into
                size = part_bytes(seal.data_bytes, range(count))
                await self._send(writer, Go())
                with handed_over(writer) as socket, chunks.of_parity(step, self._hosts.name(self._host)):
                    sum_.receive(number, to, socket, size, index.digests[:count], self._patience, self._stop)
        return index, size

    async def _cells(
        self, index: shard.Index, size: int, wanted: range, into: tuple[Sum, int, Window]
    ) -> None:
        sum_, number, to = into
        async with self._visit() as (reader, writer):
            await self._want_chunks(reader, writer, index, wanted)
            digests = index.digests[wanted.start : wanted.stop]
            with handed_over(writer) as socket, chunks.of(index, self._hosts.name(self._host)):
                size = part_bytes(size, wanted)
                sum_.receive(number, to, socket, size, digests, self._patience, self._stop)


async def answer(
    parities: ParityMemory,
    number_of: Callable[[Stripe], int],
    request: visits.OfMemory,
    connection: peers.Connection,
) -> bool:
    """Do what another host asks of this one's parities (peers.More).

    number_of: says which stripe's parity this host keeps; raises SaveError if it keeps none for that one.
    """
    reader, writer = connection
    match request:
        case Add(rank):
            slot, seal = peers.slot_and_seal(request)
            _, encoded = await visiting.hear(reader, IndexComes)
            stripe = _stripe(request)
            piece = ParityPiece(rank, stripe, ParityMember(slot, seal, encoded), request.keep)
            await _take(parities, number_of(stripe), piece, writer)
            writer.write(visiting.encode(VisitDone()))
        case WantParities():
            held = await asyncio.to_thread(parities.has)
            writer.write(visiting.encode(visits.Parities(held)))
        case WantParity(step=step, timeline=timeline, count=count):
            stripe = _stripe(request)
            seal, encoded, window = await asyncio.to_thread(parities.find, stripe, step, timeline)
            writer.write(visiting.encode(There(seal.encode().hex()), encoded))
            if count:
                await visiting.hear(reader, Go)
                digests = parity.parse_index(encoded, seal).digests[:count]
                with chunks.of_parity(step):
                    await peers.give(writer, chunks.part_of(window, range(count)), digests)
        case _:
            return False
    return True


def _stripe(said: Add | WantParity) -> Stripe:
    """Return the stripe that a message is of. Raises SaveError for nonsense."""
    if not 0 <= said.place < len(said.group) or not 0 <= said.copies <= len(said.group) - LEAST_GROUP:
        raise SaveError(f"No group of hosts has a parity {said.place} beside {said.copies} copies.")
    return Stripe(tuple(said.group), said.place, said.copies)


async def _take(
    parities: ParityMemory, number: int, piece: ParityPiece, writer: asyncio.StreamWriter
) -> None:
    """Have a cell come under a parity."""
    # What takes long is no matter for the loop, which others wait for.
    one = await asyncio.to_thread(parities.begin, number, piece)

    def receive(socket: int, stop: int) -> None:
        one.sum.receive(piece.rank, one.window, socket, one.size, one.digests, ANSWER_SECONDS, stop)

    with chunks.of(one.index):
        await peers.beside(writer, receive, Go())
    await asyncio.to_thread(parities.arrived, one)
