"""A shard from other hosts' memory, a part of it from each host that has it, all at once."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from jitckpt.decisions.sources import Source, shares
from jitckpt.errors import SaveError
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import chunks, shard
from jitckpt.tiers.decoding import PieceLost
from jitckpt.tiers.peers import PeerMemory
from jitckpt.tiers.tier import Taker

Value = TypeVar("Value")
LEAST_SHARED = 2 * shard.CHUNK  # bytes; what is less comes from one host


def get(holders: Mapping[Source, PeerMemory], timeline: str, into: Taker) -> int:
    """Bring the shard of these sources, which is one and the same, into memory; return its bytes.

    holders: the hosts that have it, the one to be asked first in front. timeline: as the shards have it.
    Raises PieceLost with the source that is at fault; SaveError if there is no room.
    """
    first, *_ = holders
    if len(holders) == 1 or first.bytes < LEAST_SHARED:
        return _of(first, lambda: holders[first].get(first.rank, first.step, timeline, into))
    slot, seal, encoded = _of(first, lambda: holders[first].index(first.rank, first.step, timeline))
    with into.coming(first.rank, slot, seal, encoded) as (index, window):
        parts = shares(len(index.checksums), len(holders))
        with ThreadPoolExecutor(len(holders), "jitckpt-memory-get") as pool:
            coming: dict[Source, Future[None]] = {
                source: pool.submit(peer.chunks_into, index, part, chunks.part_of(window, part))
                for (source, peer), part in zip(holders.items(), parts, strict=False)
            }
        for source, one in coming.items():
            _of(source, one.result)
    return seal.size


def _of(source: Source, call: Callable[[], Value]) -> Value:
    """Call, and say of which source it is if it fails."""
    try:
        return call()
    except (SaveError, LinkError) as error:
        raise PieceLost(source, error) from error
