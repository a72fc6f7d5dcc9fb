"""The optimizer's steps that other hosts make again, over the agents' connections: gradients go there.

Where the other host can't, or makes other bits than there are here, a whole copy is to go there (peers.py).
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from jitckpt.errors import SaveError
from jitckpt.hosts import link
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import chunks, peers, remaking, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.peers import ANSWER_SECONDS, PeerMemory, handed_over
from jitckpt.tiers.remaking import CannotRemakeError, DiffersError, Remaker
from jitckpt.tiers.tier import Shard

MOST_TAIL = 64 << 20  # bytes of tensors that were on the host
# One thread makes them all, one core for each: the others are the training's.
_steps = ThreadPoolExecutor(1, "jitckpt-memory-step", torch.set_num_threads, (1,))


@dataclass(frozen=True)
class Remade:
    """What has come of it. sent: bytes. differs: the tensor that does.

    lacks: what the other host would need; lasts: and may lack the next time, too.
    """

    sent: int
    lacks: str = ""
    lasts: bool = False
    differs: str = ""


class PeerOptimizer(PeerMemory):
    """One other host that makes steps of this host's ranks."""

    def remake(self, one: Shard, beginning: Window) -> Remade:
        """Have a shard come to be there. beginning: of its data, what the step does not make."""
        return asyncio.run(self._remake(one, beginning))

    async def _remake(self, one: Shard, beginning: Window) -> Remade:
        index = shard.parse_index(one.index, one.seal)
        tail = bytes(memoryview(one.window)[index.host_from :])
        first = chunks.digests(beginning)
        header = {"remake": one.rank, "slot": one.slot, "seal": one.seal.encode().hex()}
        async with self._visit() as (reader, writer):
            await self._send(writer, header | {"digests": [digest.hex() for digest in first]})
            await self._send(writer, {"index": True}, one.index)
            await self._send(writer, {"tail": True}, tail)
            answer, _ = await self._answer(reader)
            if "lacks" in answer:
                return Remade(len(one.index) + len(tail), str(answer["lacks"]), answer.get("lasts") is True)
            with chunks.of(index, self._hosts.name(self._host)), handed_over(writer) as socket:
                chunks.send(socket, beginning, first, self._pace, self._patience, self._stop)
            answer, data = await self._answer(reader)
        sent = len(one.index) + len(tail) + beginning.size
        if "lacks" in answer:
            return Remade(sent, str(answer["lacks"]), answer.get("lasts") is True)
        return Remade(sent, differs=_first_that_differs(one, data) if "differs" in answer else "")


def _first_that_differs(one: Shard, data: bytes) -> str:
    """Return the tensor that is another there in that way which is most like the device's."""
    index = shard.parse_index(one.index, one.seal)
    here = remaking.digests(index, one.window)
    try:
        ways = [dict(way) for way in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise LinkError(f"A host's digests of what it has made make no sense: {error}.") from error
    differing = [[name for name, digest in here.items() if way.get(name) != digest] for way in ways]
    nearest: list[str] = min(differing, key=len, default=[])
    return nearest[0] if nearest else "what lies between the tensors"


async def answer(
    memory: HostMemory,
    remaker: Remaker,
    may_put: Callable[[int], str | None],
    request: link.Header,
    connection: peers.Connection,
) -> bool:
    """Do what another host asks of this one's optimizer steps (peers.More)."""
    match request:
        case {"remake": int(rank), "digests": list(digests)}:
            pass
        case _:
            return False
    reader, writer = connection
    slot, seal = peers.slot_and_seal(request)
    _, encoded = await link.receive(reader)
    _, tail = await link.receive(reader)
    if (reason := may_put(rank)) is not None:
        raise SaveError(reason)
    try:
        needed = await asyncio.to_thread(remaker.needed, slot, seal, encoded)
        with ExitStack() as stack:
            coming = memory.coming(rank, slot, seal, encoded)
            index, window = await asyncio.to_thread(stack.enter_context, coming)
            assert index.made_by is not None
            beginning = memory.beginning(rank, slot, index.made_by.sent)
            first = [bytes.fromhex(str(one)) for one in digests]

            def receive(socket: int, stop: int) -> None:
                chunks.receive(socket, beginning, first, ANSWER_SECONDS, stop)

            with chunks.of(index):
                await peers.beside(writer, receive, {"go": True})
            rest = memoryview(window)[index.host_from :]
            if len(tail) != len(rest):
                raise SaveError(
                    f"{len(tail)} bytes of the host's part have come, in the place of {len(rest)}."
                )
            rest[:] = tail
            await asyncio.get_running_loop().run_in_executor(_steps, remaker.make, index, window, needed)
    except CannotRemakeError as error:
        writer.write(link.encode({"lacks": str(error), "lasts": error.lasts}))
    except DiffersError as error:
        writer.write(link.encode({"differs": rank}, json.dumps(error.digests).encode()))
    else:
        writer.write(link.encode({"kept": rank}))
    return True
