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
from jitckpt.hosts import visiting
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import chunks, peers, remaking, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.peers import ANSWER_SECONDS, PeerMemory, handed_over
from jitckpt.tiers.remaking import CannotRemakeError, DiffersError, Remaker
from jitckpt.tiers.tier import Shard
from jitckpt.wire import visits
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.visits import Differs, Fails, Go, IndexComes, Lacks, Remake, TailComes, VisitDone

MOST_TAIL = 64 << 20  # bytes of tensors that were on the host
# One thread makes them all, one core for each: the others are the training's.
_steps = ThreadPoolExecutor(1, "jitckpt-memory-step", torch.set_num_threads, (1,))


@dataclass(frozen=True)
class Remade:
    """What has come of it. sent: bytes. differs: the tensor that does.

    lacks: what the other host would need; lasts: and may lack the next time, too. fails: why no such step
    can be made there.
    """

    sent: int
    lacks: str = ""
    lasts: bool = False
    differs: str = ""
    fails: str = ""


class PeerOptimizer(PeerMemory):
    """One other host that makes steps of this host's ranks."""

    def remake(self, one: Shard, beginning: Window) -> Remade:
        """Have a shard come to be there. beginning: of its data, what the step does not make."""
        return asyncio.run(self._remake(one, beginning))

    async def _remake(self, one: Shard, beginning: Window) -> Remade:
        index = shard.parse_index(one.index, one.seal)
        tail = bytes(memoryview(one.window)[index.host_from :])
        first = chunks.digests(beginning)
        digests = [digest.hex() for digest in first]
        async with self._visit() as (reader, writer):
            await self._send(writer, Remake(one.rank, one.slot, one.seal.encode().hex(), digests))
            await self._send(writer, IndexComes(), one.index)
            await self._send(writer, TailComes(), tail)
            begins, _ = await self._answer(reader, Go, Lacks, Fails)
            if isinstance(begins, Lacks | Fails):
                return _not_made(len(one.index) + len(tail), begins)
            with chunks.of(index, self._hosts.name(self._host)), handed_over(writer) as socket:
                chunks.send(socket, beginning, first, self._pace, self._patience, self._stop)
            ends, data = await self._answer(reader, VisitDone, Lacks, Fails, Differs)
        sent = len(one.index) + len(tail) + beginning.size
        if isinstance(ends, Lacks | Fails):
            return _not_made(sent, ends)
        return Remade(sent, differs=_first_that_differs(one, data) if isinstance(ends, Differs) else "")


def _not_made(sent: int, said: Lacks | Fails) -> Remade:
    if isinstance(said, Fails):
        return Remade(sent, fails=said.why)
    return Remade(sent, said.what, said.lasts)


def _first_that_differs(one: Shard, data: bytes) -> str:
    """Return the tensor that is another there in that way which is most like the device's."""
    index = shard.parse_index(one.index, one.seal)
    here = remaking.digests(index, one.window)
    try:
        ways = [dict(way) for way in json.loads(data)]
    except (ValueError, TypeError, RecursionError) as error:
        raise LinkError(f"A host's digests of what it has made make no sense: {error}.") from error
    differing = [[name for name, digest in here.items() if way.get(name) != digest] for way in ways]
    nearest: list[str] = min(differing, key=len, default=[])
    return nearest[0] if nearest else "what lies between the tensors"


async def answer(
    memory: HostMemory,
    remaker: Remaker,
    may_put: Callable[[int], str | None],
    request: visits.OfMemory,
    connection: peers.Connection,
) -> bool:
    """Do what another host asks of this one's optimizer steps (peers.More)."""
    if not isinstance(request, Remake):
        return False
    rank, (reader, writer) = request.rank, connection
    slot, seal = peers.slot_and_seal(request)
    _, encoded = await visiting.hear(reader, IndexComes)
    _, tail = await visiting.hear(reader, TailComes)
    if (reason := may_put(rank)) is not None:
        raise SaveError(reason)
    try:
        needed = await asyncio.to_thread(remaker.needed, slot, seal, encoded)
        with ExitStack() as stack:
            coming = memory.coming(rank, slot, seal, encoded)
            index, window = await asyncio.to_thread(stack.enter_context, coming)
            assert index.made_by is not None
            beginning = memory.beginning(rank, slot, index.made_by.sent)
            first = [bytes.fromhex(one) for one in request.digests]

            def receive(socket: int, stop: int) -> None:
                chunks.receive(socket, beginning, first, ANSWER_SECONDS, stop)

            with chunks.of(index):
                await peers.beside(writer, receive, Go())
            rest = memoryview(window)[index.host_from :]
            if len(tail) != len(rest):
                raise SaveError(
                    f"{len(tail)} bytes of the host's part have come, in the place of {len(rest)}."
                )
            rest[:] = tail
            await asyncio.get_running_loop().run_in_executor(_steps, remaker.make, index, window, needed)
    except CannotRemakeError as error:
        writer.write(visiting.encode(Lacks(str(error), error.lasts)))
    except DiffersError as error:
        writer.write(visiting.encode(Differs(), json.dumps(error.digests).encode()))
    except (SaveError, LinkError, ProtocolError, OSError):
        raise
    except Exception as error:  # torch's, mostly: it would be the same in each step
        writer.write(visiting.encode(Fails(f"{type(error).__name__}: {error}")))
    else:
        writer.write(visiting.encode(VisitDone()))
    return True
