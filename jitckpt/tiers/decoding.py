"""A shard that is lost, decoded in this host's memory from parity and the other members' shards (REFT's AEC).

Each cell of it is the XOR of the parity that it is under and of the other members' cells there. All pieces
come at once, one at a time from each host. Each chunk is checked as it comes, then the whole.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from jitckpt.decisions.sources import Parity, Piece, Source
from jitckpt.errors import JitckptError, SaveError
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import chunks, shard
from jitckpt.tiers.chunks import Sum, Window
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.parity import ParityIndex, ParityMember, ParityMemory, Stripe, parse_index

Into = tuple[Sum, int, Window]  # a sum, which of its pieces, and where it is


class PieceLost(JitckptError):
    """What a shard was to be decoded from can't be had, or is damaged."""

    def __init__(self, piece: Piece, reason: Exception) -> None:
        super().__init__(str(reason))
        self.piece = piece


class Pieces(Protocol):
    """What a host has to decode from. Each raises SaveError or LinkError.

    What goes into a sum: the bytes that came from another host are returned.
    """

    def parity_index(self, stripe: Stripe, step: int, timeline: str) -> ParityIndex: ...

    def parity_into(self, stripe: Stripe, step: int, timeline: str, wanted: range, into: Into) -> int: ...

    def cells_into(self, index: shard.Index, size: int, wanted: range, into: Into) -> int: ...


class OwnPieces:
    """What this host has itself."""

    def __init__(self, memory: HostMemory, parities: ParityMemory) -> None:
        self._memory, self._parities = memory, parities

    def parity_index(self, stripe: Stripe, step: int, timeline: str) -> ParityIndex:
        seal, encoded, _ = self._parities.find(stripe, step, timeline)
        return parse_index(encoded, seal)

    def parity_into(self, stripe: Stripe, step: int, timeline: str, wanted: range, into: Into) -> int:
        seal, encoded, window = self._parities.find(stripe, step, timeline)
        with chunks.of_parity(step):
            _add(chunks.part_of(window, wanted), parse_index(encoded, seal).digests[: wanted.stop], into)
        return 0

    def cells_into(self, index: shard.Index, size: int, wanted: range, into: Into) -> int:
        one = self._memory.shard(index.identity.rank, index.step, index.timeline)
        with chunks.of(index):
            _add(chunks.part_of(one.window, wanted), index.digests[wanted.start : wanted.stop], into)
        return 0


class NearPieces:
    """What another host has; shards that this host has as well are read here."""

    def __init__(self, own: OwnPieces, there: Pieces) -> None:
        self._own, self._there = own, there

    def parity_index(self, stripe: Stripe, step: int, timeline: str) -> ParityIndex:
        return self._there.parity_index(stripe, step, timeline)

    def parity_into(self, stripe: Stripe, step: int, timeline: str, wanted: range, into: Into) -> int:
        return self._there.parity_into(stripe, step, timeline, wanted, into)

    def cells_into(self, index: shard.Index, size: int, wanted: range, into: Into) -> int:
        try:
            return self._own.cells_into(index, size, wanted, into)
        except SaveError:  # nothing of it is added then
            return self._there.cells_into(index, size, wanted, into)


def decode(source: Source, timeline: str, pieces_of: Callable[[int], Pieces], into: HostMemory) -> int:
    """Bring the shard of a source of this kind into this host's memory; return the bytes that came to it.

    timeline: as the shards have it. pieces_of: by host. Raises PieceLost; SaveError if what comes out is
    wrong all the same, or can't be put there.
    """
    parities = [one for one in source.made_of if isinstance(one, Parity)]
    members: dict[int, ParityMember] = {}
    for one in parities:
        with _from(one):
            found = pieces_of(one.host).parity_index(_stripe(one), source.step, timeline)
            members |= found.members
    lost = members[source.rank]
    with into.coming(source.rank, lost.slot, lost.seal, lost.index) as (index, window):
        by_host: dict[int, list[_Read]] = defaultdict(list)
        for parity in parities:
            for read in _reads(source, parity, members, window):
                by_host[read.piece.host].append(read)
        with ThreadPoolExecutor(len(by_host)) as pool:
            size = sum(
                pool.map(lambda host: _carry_out(by_host[host], pieces_of(host), timeline), by_host.keys())
            )
        with chunks.of(index):
            chunks.verify(window, index.digests)
    return size


@dataclass(frozen=True)
class _Read:
    """Chunks of a piece that are to be added to a sum. index: of a shard; size: its bytes."""

    piece: Piece
    wanted: range
    into: Into
    index: shard.Index | None = None
    size: int = 0


def _reads(
    source: Source, parity: Parity, members: Mapping[int, ParityMember], window: Window
) -> Iterator[_Read]:
    """Yield what gives the cell of the lost shard that is under a parity."""
    stripe = _stripe(parity)
    cell = stripe.cell_of(source.rank, window.size)
    if not cell:
        return
    sum_, to = Sum(), chunks.part_of(window, cell)
    yield _Read(parity, range(len(cell)), (sum_, 0, to))
    others = [one for one in source.made_of if isinstance(one, Source) and one.rank in stripe.others()]
    for number, one in enumerate(others, 1):
        member = members[one.rank]
        theirs = stripe.cell_of(one.rank, member.seal.data_bytes)[: len(cell)]
        if theirs:
            index = shard.parse_index(member.index, member.seal)
            yield _Read(one, theirs, (sum_, number, to), index, member.seal.data_bytes)


def _carry_out(reads: Sequence[_Read], pieces: Pieces, timeline: str) -> int:
    """Read what one host has; return the bytes that came from it."""
    size = 0
    for read in reads:
        with _from(read.piece):
            if isinstance(read.piece, Parity):
                size += pieces.parity_into(
                    _stripe(read.piece), read.piece.step, timeline, read.wanted, read.into
                )
            else:
                assert read.index is not None
                size += pieces.cells_into(read.index, read.size, read.wanted, read.into)
    return size


def _stripe(parity: Parity) -> Stripe:
    return Stripe(parity.group, parity.place, parity.copies)


@contextmanager
def _from(piece: Piece) -> Iterator[None]:
    try:
        yield
    except (SaveError, LinkError) as error:
        raise PieceLost(piece, error) from error


def _add(window: Window, digests: Sequence[bytes], into: Into) -> None:
    """Add chunks that are in this host's memory."""
    sum_, number, to = into
    chunks.verify(window, digests)
    data = memoryview(window)
    for at in range(len(digests)):
        sum_.add(number, at, data[at * shard.CHUNK : (at + 1) * shard.CHUNK], to)
