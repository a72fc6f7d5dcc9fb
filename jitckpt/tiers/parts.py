"""Parts of shards that no host has room for as a whole; and the shard put together again of them.

A part is kept and sent like a shard: its data are some of the shard's chunks, with the same checksums, and
its index says which, and has the shard's seal and index, so that the parts alone are enough.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from jitckpt.decisions.sources import PartOfShard
from jitckpt.errors import SaveError
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import chunks, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.decoding import PieceLost
from jitckpt.tiers.shard import Index, Seal, ShardPart
from jitckpt.tiers.tier import Shard, Taker
from jitckpt.wire.visits import HeldPart

HeldParts = tuple[list[HeldPart], list[HeldPart]]  # in a host's memory, and in its directory


def part_of(one: Shard, first: int, count: int) -> Shard:
    """Return so many chunks of a shard, from the first one on, as what is sent."""
    index = shard.parse_index(one.index, one.seal)
    window = one.window.part(first, count)
    part = replace(
        index,
        checksums=list(index.checksums[first : first + count]),
        tensors={},
        host_from=0,
        document={},
        cut=None,
        made_by=None,
        part=ShardPart(first, one.seal.encode().hex(), one.index.decode()),
    ).encode()
    return Shard(one.rank, one.slot, shard.seal_of(part, index.step, window.size), part, window)


def told(index: Index, seal: Seal) -> HeldPart:
    """Return what is said of a part. Raises SaveError if it is none, or damaged."""
    identity = index.identity
    if index.part is None:
        raise SaveError(f"Step {index.step} of rank {identity.rank} is no part of a shard.")
    whole, _ = index.part.whole()
    first, count, total = index.part.first, len(index.checksums), shard.chunks_in(whole.data_bytes)
    if first + count > total:
        raise SaveError(f"A part of step {index.step} of rank {identity.rank} is longer than the shard.")
    return HeldPart(
        *(identity.rank, index.step, index.timeline, first, count, total, seal.size),
        *(identity.job, identity.world_size, identity.start, whole.index_checksum.hex()),
    )


@dataclass(frozen=True)
class ReadPart:
    """A part as it is read: which chunks, and what puts them, with their checksums, into a window."""

    source: PartOfShard
    wanted: range
    read: Callable[[Window, Sequence[bytes]], None]


def put_together(slot: int, of: ShardPart, pieces: Sequence[ReadPart], into: Taker) -> int:
    """Bring a shard into this host's memory, all pieces at once; return its bytes.

    of: what one of its parts has of the shard. Raises PieceLost; SaveError if there is no room.
    """
    seal, encoded = of.whole()
    rank = pieces[0].source.rank
    with into.coming(rank, slot, seal, encoded) as (index, window):
        digests = index.digests

        def read(piece: ReadPart) -> None:
            first, end = piece.wanted.start, piece.wanted.stop
            try:
                with chunks.of(index, first=first):
                    piece.read(window.part(first, end - first), digests[first:end])
            except (SaveError, LinkError) as error:
                raise PieceLost(piece.source, error) from error

        with ThreadPoolExecutor(len(pieces), "jitckpt-memory-parts") as pool:
            list(pool.map(read, pieces))
    return seal.size
