"""What replicas hold alike, cut among them: each copies its own part to host memory (REFT's sharding).

A shard's tensors, one after another in the order of their names, are as many bytes; member d of D has those
from d/D on to (d + 1)/D. Whoever makes a snapshot cuts anew, so a member that is lost or joins changes the
cut from the next one on.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

GRAIN = 16  # bytes; no element is wider, and a part begins with one


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a tensor, from `begin` on up to `end`."""

    name: str
    begin: int
    end: int


def members(shards: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks that hold what `rank` holds, in order; shards: of all ranks."""
    return tuple(other for other, shard in enumerate(shards) if shard == shards[rank])


def parts(
    sizes: Mapping[str, int], count: int, number: int, uncut: Collection[str] = ()
) -> Iterator[ByteRange]:
    """Yield what member `number` of `count` copies; sizes: of the tensors, in bytes.

    uncut: those that go as a whole to whoever has their first byte.
    """
    whole = sum(sizes.values())
    begin, end = (whole * one // count for one in (number, number + 1))
    place = 0
    for name in sorted(sizes):
        size = sizes[name]
        if name in uncut or size == 0:
            is_last = number == count - 1 and place >= end
            if begin <= place < end or is_last:
                yield ByteRange(name, 0, size)
        elif (first := _within(begin - place, size)) < (last := _within(end - place, size)):
            yield ByteRange(name, first, last)
        place += size


def _within(border: int, size: int) -> int:
    """Return the border in a tensor between two members."""
    return min(size, -(-max(0, border) // GRAIN) * GRAIN)
