"""What of a shard that is to come a host has already in another one of the same step: that is not sent.

Such are ZeRO-1's parameters, and all that is replicated beside parts that are not. The checksums say so, of
whole chunks at the same place, and each is checked once more where it comes to lie.
"""

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jitckpt.errors import SaveError
from jitckpt.tiers import chunks, host_memory, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import BEGUN, OFF, HostMemory
from jitckpt.tiers.shard import Index

MOST_AT_ONCE = 64  # chunks that are copied before the other side hears of it
LOOK_SECONDS = 0.005
# So long a snapshot that is nearly there is waited for; who sends waits for an answer a little longer.
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class ChunkRun:
    """Chunks one after another, and whose data have them, too."""

    chunks: range
    window: Window


def runs(numbers: Collection[int], most: int) -> Iterator[range]:
    """Yield numbers, which ascend, in runs of at most so many."""
    first = last = -1
    for number in numbers:
        if first < 0 or number != last + 1 or number - first == most:
            if first >= 0:
                yield range(first, last + 1)
            first = number
        last = number
    if first >= 0:
        yield range(first, last + 1)


def missing(there: Sequence[range], count: int) -> list[range]:
    """Return what is to be sent of so many chunks if these are there. Raises ValueError if they can't be."""
    found, at = [], 0
    for run in there:
        if run.start < at or not run or run.stop > count:
            raise ValueError(f"chunks {run.start} to {run.stop} of {count} are none, or were there before")
        found.append(range(at, run.start))
        at = run.stop
    return [run for run in (*found, range(at, count)) if run]


async def find(memory: HostMemory, own: Collection[int], index: Index) -> list[ChunkRun]:
    """Return what shards of these ranks have of one that is to come, once their snapshots are made."""
    if _are_alike(memory, own, index):
        until = time.monotonic() + PATIENCE_SECONDS
        while any(_is_made(memory, rank, index.step) for rank in own) and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
    return await asyncio.to_thread(_find, memory, own, index)


def copied(run: ChunkRun, index: Index, to: Window) -> bool:
    """Have chunks that are here where they are to be; return whether they are whole."""
    digests = index.digests[run.chunks.start : run.chunks.stop]
    try:
        with chunks.of(index, first=run.chunks.start):
            chunks.copy(chunks.part_of(run.window, run.chunks), digests, chunks.part_of(to, run.chunks))
    except SaveError:
        return False
    return True


def _find(memory: HostMemory, own: Collection[int], index: Index) -> list[ChunkRun]:
    by_chunk: dict[int, Window] = {}
    for rank in own:
        try:
            one = memory.shard(rank, index.step, index.timeline)
            here = shard.parse_index(one.index, one.seal).checksums
        except SaveError:  # there is none of this step, or it is damaged: what it has is sent
            continue
        by_chunk = {number: one.window for number in _same(here, index.checksums)} | by_chunk
    found: list[ChunkRun] = []
    for window in dict.fromkeys(by_chunk.values()):
        of_one = sorted(number for number, its in by_chunk.items() if its is window)
        found += [ChunkRun(run, window) for run in runs(of_one, MOST_AT_ONCE)]
    return sorted(found, key=lambda run: run.chunks.start)


def _are_alike(memory: HostMemory, own: Collection[int], index: Index) -> bool:
    """Return whether it is worth while to wait: something was alike before, or nothing is known of before."""
    before = [one for one in _indexes(memory, index.identity.rank) if one.step < index.step]
    ours = [one for rank in own for one in _indexes(memory, rank)] if before else []
    pairs = [(one, other) for one in before for other in ours if one.step == other.step]
    return not pairs or any(_same(one.checksums, other.checksums) for one, other in pairs)


def _indexes(memory: HostMemory, rank: int) -> Iterator[Index]:
    descriptor = memory.descriptors.get(rank)
    if descriptor is None:
        return
    for slot, seal in host_memory.found(descriptor):
        with suppress(SaveError):  # it is damaged
            yield host_memory.index_in(descriptor, slot, seal)


def _same(here: Sequence[str], there: Sequence[str]) -> list[int]:
    both = enumerate(zip(here, there, strict=False))
    return [number for number, (one, other) in both if one == other]


def _is_made(memory: HostMemory, rank: int, step: int) -> bool:
    """Return whether a rank of this host is about to have its snapshot of this step."""
    descriptor = memory.descriptors.get(rank)
    if descriptor is None or host_memory.word(descriptor, OFF):
        return False
    return host_memory.word(descriptor, BEGUN) == step and all(
        seal.step != step for _, seal in host_memory.found(descriptor)
    )
