"""Which shards can be decoded from parity, or put together of parts: sources like others for sources.py."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from jitckpt.decisions.redundancy import parities_of, under
from jitckpt.decisions.sources import NOBODY, Kind, Parity, PartOfShard, Piece, Source


def decodable(
    sources: Sequence[Source], parities: Sequence[Parity], failed: Collection[Piece] = ()
) -> Iterator[Source]:
    """Yield a source for each rank of which nobody has a step that parity and the others' shards give.

    failed: what its check has found damaged, or could not be had: nothing is decoded from it.
    """
    out = frozenset(failed)
    shards = {(one.rank, one.step, one.timeline): one for one in sources if one not in out}
    by_group: dict[tuple[tuple[int, ...], int, int, str], dict[int, Parity]] = defaultdict(dict)
    for parity in parities:
        if parity not in out:
            by_group[parity.group, parity.copies, parity.step, parity.timeline][parity.place] = parity
    for (group, copies, step, timeline), by_place in sorted(by_group.items()):
        there = {
            place: shards.get((rank, step, timeline)) for place, rank in enumerate(group) if rank != NOBODY
        }
        for lost in sorted(place for place, one in there.items() if one is None):
            over = parities_of(len(group), lost, copies)
            others = {shard for place in over for shard in under(len(group), place, copies)} - {lost}
            whole = tuple(one for place in sorted(others) if (one := there.get(place)) is not None)
            if not by_place.keys() >= set(over) or len(whole) < len(others & there.keys()):
                continue
            pieces = [by_place[place] for place in over]
            size = (len(group) - 1 - copies) * sum(one.bytes for one in pieces)
            yield Source(group[lost], step, Kind.PARITY, timeline, pieces[0].host, size, (*pieces, *whole))


def whole_of_parts(parts: Sequence[PartOfShard], failed: Collection[Piece] = ()) -> Iterator[Source]:
    """Yield a source for each shard of which all chunks are somewhere. failed: as above."""
    out = frozenset(failed)
    by_shard: dict[tuple[int, int, str, str, int], list[PartOfShard]] = defaultdict(list)
    for part in parts:
        if part not in out:
            by_shard[part.rank, part.step, part.timeline, part.of, part.chunks].append(part)
    for (rank, step, timeline, _, chunks), found in sorted(by_shard.items()):
        end = 0
        used: list[PartOfShard] = []
        # Of those that go on where the last one ends that which goes farthest.
        while reach := [one for one in found if one.first <= end < one.first + one.count]:
            used.append(max(reach, key=lambda one: (one.first + one.count, not one.in_directory, -one.host)))
            end = used[-1].first + used[-1].count
        if used and end == chunks:
            size = sum(one.bytes for one in used)
            yield Source(rank, step, Kind.PARTS, timeline, used[0].host, size, tuple(used))
