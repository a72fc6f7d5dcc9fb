"""What replicas hold alike, cut among them: each copies its own part to host memory (REFT's sharding).

A shard's tensors, one after another in the order of their names, are as many bytes; member d of D has those
from d/D on to (d + 1)/D. Whoever makes a snapshot cuts anew, so a member that is lost or joins changes the
cut from the next one on.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jitckpt.decisions.sizes import show_bytes
from jitckpt.decisions.sources import listed

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


@dataclass(frozen=True)
class RanksRoom:
    """What a rank says of itself: its shard, host, the bytes of its state, and those that it may take."""

    shard: int
    host: int
    size: float
    limit: float


def for_room(of_ranks: Sequence[RanksRoom], copies: int) -> list[int]:
    """Return the shards that replicas are to cut among them, since whole states have no room, and parts have.

    Of each two steps are kept, here and on as many other hosts as there are further copies. A cut state needs
    room for all of it, too, where it is put together after a failure; so two replicas alone gain nothing.
    """
    found = []
    for shard in sorted({one.shard for one in of_ranks}):
        ranks = [one for one in of_ranks if one.shard == shard]
        if len({one.host for one in ranks}) < len(ranks) or len(ranks) < copies:
            continue  # a host would have more than one part, or too few hosts have one
        whole = [2 * copies * one.size for one in ranks]
        in_parts = [2 * one.size * (1 + copies / len(ranks)) for one in ranks]
        lacks = any(need > one.limit for need, one in zip(whole, ranks, strict=True))
        if lacks and all(need <= one.limit for need, one in zip(in_parts, ranks, strict=True)):
            found.append(shard)
    return found


def in_words(of_ranks: Sequence[RanksRoom], shards: Collection[int]) -> str:
    """Return which ranks' states are cut, and why; shards: as from `for_room`."""
    ranks = [rank for rank, one in enumerate(of_ranks) if one.shard in shards]
    size = max(of_ranks[rank].size for rank in ranks)
    return (
        f"{listed(ranks)} keep a part each of what their replicas on other hosts hold, too, and another host "
        f"that part: whole states of {show_bytes(size)} and their copies have no room"
    )


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
