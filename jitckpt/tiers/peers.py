"""The tier in other hosts' memory, over the agents' authenticated connections: one visit for each shard.

Whoever has a shard sends its seal, its index and then its chunks; who takes it checks each. Neither side
touches a device, a collective or the training's interpreter.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from jitckpt.errors import SaveError
from jitckpt.hosts import link
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import shard
from jitckpt.tiers.tier import Held, Shard, Tier

VISIT = "memory"  # what an agent says that comes for this
ANSWER_SECONDS = 30.0
SLOTS = (0, 1)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PeerMemory(Tier):
    """What one other host's memory has. A host that is lost, or says nonsense, is a LinkError."""

    def __init__(self, hosts: Hosts, host: int, patience: float = ANSWER_SECONDS) -> None:
        """patience: seconds for each answer, and for each chunk to be taken."""
        self._hosts, self._host, self._patience = hosts, host, patience

    def put(self, shard: Shard) -> None:
        asyncio.run(self._put(shard))

    def has(self) -> Sequence[Held]:
        return asyncio.run(self._has())

    def get(self, rank: int, step: int, timeline: str) -> Shard:
        """Return it with all its chunks read: they can't wait in a connection."""
        return asyncio.run(self._get(rank, step, timeline))

    def drop(self, rank: int, step: int) -> None:
        asyncio.run(self._drop(rank, step))

    async def _put(self, one: Shard) -> None:
        async with self._visit() as (reader, writer):
            await self._send(writer, {"put": one.rank, "slot": one.slot, "seal": one.seal.encode().hex()})
            await self._send(writer, {"index": True}, one.index)
            for chunk in one.chunks:
                await self._send(writer, {"chunk": True}, chunk)
            await self._answer(reader)

    async def _has(self) -> Sequence[Held]:
        async with self._visit() as (reader, writer):
            await self._send(writer, {"has": True})
            _, data = await self._answer(reader)
        try:
            return [Held(**one) for one in json.loads(data)]
        except (ValueError, TypeError) as error:
            raise LinkError(f"A host's list of what is in its memory makes no sense: {error}.") from error

    async def _get(self, rank: int, step: int, timeline: str) -> Shard:
        async with self._visit() as (reader, writer):
            await self._send(writer, {"get": rank, "step": step, "timeline": timeline})
            header, encoded = await self._answer(reader)
            slot, seal = _slot_and_seal(header)
            index = shard.parse_index(encoded, seal)
            chunks = []
            for number in range(len(index.checksums)):
                _, chunk = await self._answer(reader)
                shard.check_chunk(index, number, chunk)
                chunks.append(chunk)
        return Shard(rank, slot, seal, encoded, chunks)

    async def _drop(self, rank: int, step: int) -> None:
        async with self._visit() as (reader, writer):
            await self._send(writer, {"drop": rank, "step": step})
            await self._answer(reader)

    @asynccontextmanager
    async def _visit(self) -> AsyncIterator[Connection]:
        try:
            async with self._hosts.visit(self._host, VISIT) as connection:
                yield connection
        except OSError as error:
            raise LinkError(f"{self._hosts.name(self._host)} can't be reached: {error}.") from error

    async def _send(self, writer: asyncio.StreamWriter, header: link.Header, data: bytes = b"") -> None:
        writer.write(link.encode(header, data))
        try:
            async with asyncio.timeout(self._patience):
                await writer.drain()
        except TimeoutError as error:
            raise LinkError(f"{self._hosts.name(self._host)} takes nothing more.") from error

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
        try:
            async with asyncio.timeout(self._patience):
                header, data = await link.receive(reader)
        except TimeoutError as error:
            raise LinkError(
                f"{self._hosts.name(self._host)} does not answer within {self._patience:g} s."
            ) from error
        if "error" in header:
            raise SaveError(f"{self._hosts.name(self._host)} says: {header['error']}")
        return header, data


async def serve(
    memory: Tier,
    may_put: Callable[[int], str | None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Do what another host asks of this one's memory, and answer. Raises LinkError at the visit's end.

    may_put: says why nothing of a rank is taken in here, if so.
    """
    loop = asyncio.get_running_loop()
    request, _ = await link.receive(reader)
    try:
        match request:
            case {"put": int(rank)}:
                slot, seal = _slot_and_seal(request)
                _, index = await link.receive(reader)
                if (reason := may_put(rank)) is not None:
                    raise SaveError(reason)

                def chunks() -> Iterator[bytes]:
                    for _ in range(shard.chunks_in(seal.data_bytes)):
                        header, data = asyncio.run_coroutine_threadsafe(link.receive(reader), loop).result()
                        if "chunk" not in header:
                            raise SaveError("Something came where a chunk belongs.")
                        yield data

                await asyncio.to_thread(memory.put, Shard(rank, slot, seal, index, chunks()))
                writer.write(link.encode({"kept": rank}))
            case {"has": True}:
                held = await asyncio.to_thread(memory.has)
                writer.write(link.encode({"held": True}, json.dumps([asdict(one) for one in held]).encode()))
            case {"get": int(rank), "step": int(step), "timeline": str(timeline)}:
                one = await asyncio.to_thread(memory.get, rank, step, timeline)
                header = {"slot": one.slot, "seal": one.seal.encode().hex()}
                writer.write(link.encode(header, one.index))
                pieces = iter(one.chunks)
                while piece := await asyncio.to_thread(next, pieces, b""):
                    writer.write(link.encode({"chunk": True}, piece))
                    await writer.drain()
            case {"drop": int(rank), "step": int(step)}:
                await asyncio.to_thread(memory.drop, rank, step)
                writer.write(link.encode({"dropped": rank}))
            case unknown:
                raise SaveError(f"Nobody knows what {unknown!r:.200} asks for.")
    except (SaveError, OSError, ValueError) as error:
        writer.write(link.encode({"error": str(error)}))
    await writer.drain()


def _slot_and_seal(header: link.Header) -> tuple[int, shard.Seal]:
    try:
        seal = shard.parse_seal(bytes.fromhex(header["seal"]))
    except (KeyError, TypeError, ValueError) as error:
        raise SaveError(f"A shard came without its seal: {error!r:.100}.") from error
    if seal is None or header.get("slot") not in SLOTS:
        raise SaveError("A shard came with a damaged seal, or for no slot.")
    return int(header["slot"]), seal
