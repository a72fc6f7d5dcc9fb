"""Parity in this host's memory: the XOR of a cell of each other member's shard, for one step (REFT's AEC).

The hosts of a group hold only their own ranks' shards, and this. Ranks of the same place on their hosts are a
stripe. Its parity has a memfd, as a rank's shards have (host_memory.py): two slots, one of them whole while
the other grows. Pieces are added as they come, so nothing but the sum takes memory. The index has the indexes
of all shards under it, so what is lost can be told from it; decoding.py gives it back.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jitckpt.decisions.redundancy import LEAST_GROUP, cell, under
from jitckpt.decisions.sources import NOBODY
from jitckpt.errors import SaveError
from jitckpt.saves import layout
from jitckpt.tiers import chunks, host_memory, shard
from jitckpt.tiers.chunks import Sum, Window
from jitckpt.tiers.host_memory import SLOTS
from jitckpt.tiers.shard import CHUNK, Index, Seal
from jitckpt.wire.visits import HeldParity


@dataclass(frozen=True)
class Stripe:
    """Ranks whose shards have parity in common, one of each member of a group of hosts; NOBODY for none.

    place: of the member whose parity is meant: it has a cell of every other one's, but of those of which that
    member keeps one of so many `copies`.
    """

    group: tuple[int, ...]
    place: int
    copies: int = 0

    def others(self) -> set[int]:
        """Return the ranks that are under it."""
        return {self.group[of] for of in under(len(self.group), self.place, self.copies)} - {NOBODY}

    def cell_of(self, rank: int, size: int) -> range:
        """Return the chunks of a rank's shard, of so many bytes, that are under it."""
        of = self.group.index(rank)
        return cell(len(self.group), of, self.place, shard.chunks_in(size), self.copies)


@dataclass(frozen=True)
class ParityMember:
    """A shard under a parity. slot: where its own rank has it."""

    slot: int
    seal: Seal
    index: bytes = field(repr=False)


@dataclass(frozen=True)
class ParityPiece:
    """A cell on its way under a parity. keep: the step that its rank has in its other slot; 0 for none."""

    rank: int
    stripe: Stripe
    member: ParityMember
    keep: int


@dataclass(frozen=True)
class ParityIndex:
    """What a parity's index says. members: the shards under it, by rank. checksums: as a shard's."""

    stripe: Stripe
    step: int
    timeline: str
    job: str
    world_size: int
    members: Mapping[int, ParityMember]
    checksums: Sequence[str]

    @property
    def digests(self) -> list[bytes]:
        return [bytes.fromhex(one) for one in self.checksums]

    def cut_among(self) -> tuple[tuple[int, ...], ...]:
        """Return among which ranks the shards under it are, of those that are cut."""
        cuts = [shard.parse_index(one.index, one.seal).cut for one in self.members.values()]
        return tuple(sorted({tuple(cut.members) for cut in cuts if cut is not None}))

    def encode(self) -> bytes:
        members = {
            rank: [one.slot, one.seal.encode().hex(), one.index.decode()]
            for rank, one in self.members.items()
        }
        content = {
            "parity": [list(self.stripe.group), self.stripe.place, self.stripe.copies],
            "step": self.step,
            "timeline": self.timeline,
            "job": self.job,
            "world_size": self.world_size,
            "members": members,
            "checksums": self.checksums,
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def parse_index(data: bytes, seal: Seal) -> ParityIndex:
    """Return the index that belongs to this seal. Raises SaveError for any other bytes."""
    try:
        content = layout.parse_object(shard.checked(data, seal), "A parity's index")
        group, place, copies = content.pop("parity")
        members = {int(rank): _member(*one) for rank, one in content.pop("members").items()}
        index = ParityIndex(Stripe(tuple(group), place, copies), members=members, **content)
        fits = (
            index.step == seal.step
            and 0 <= place < len(group)
            and 0 <= copies <= len(group) - LEAST_GROUP
            and len(set(group) - {NOBODY}) == len(group) - group.count(NOBODY)
            and members.keys() == index.stripe.others()
            and len(index.checksums) == shard.chunks_in(seal.data_bytes)
            and all(len(one) == shard.DIGEST_BYTES for one in index.digests)
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SaveError(f"A parity's index of step {seal.step} makes no sense: {error!r:.200}.") from error
    if not fits:
        raise SaveError(f"A parity's index of step {seal.step} makes no sense: it is of another parity.")
    return index


def _member(slot: int, seal: str, index: str) -> ParityMember:
    parsed = shard.parse_seal(bytes.fromhex(seal))
    if parsed is None or slot not in SLOTS:
        raise ValueError("a shard under it has no seal")
    return ParityMember(slot, parsed, index.encode())


def part_bytes(size: int, of: range) -> int:
    """Return how many bytes some chunks of so many bytes have."""
    return min(size, of.stop * CHUNK) - min(size, of.start * CHUNK)


@dataclass
class _Growing:
    """A parity that is not whole yet, or has just become so. data_bytes: of its longest cell so far."""

    stripe: Stripe
    step: int
    timeline: str
    sum: Sum = field(default_factory=Sum)
    members: dict[int, ParityMember] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)  # ranks whose cells are in it
    data_bytes: int = 0


@dataclass(frozen=True)
class Coming:
    """Where a piece goes. wanted: the chunks of its shard, of `size` bytes. number, slot: of the parity."""

    index: Index
    wanted: range
    size: int
    sum: Sum
    window: Window
    number: int
    slot: int

    @property
    def digests(self) -> list[bytes]:
        return self.index.digests[self.wanted.start : self.wanted.stop]


class ParityMemory:
    """The parities in this host's memory, by the number of their stripe among the host's."""

    def __init__(self, descriptors: dict[int, int], limit: int, others: Callable[[], int]) -> None:
        """descriptors: memfds by stripe, from now on this object's. others: bytes that are not for parity."""
        self.descriptors = descriptors
        self._limit, self._others = limit, others
        self._growing: dict[tuple[int, int], _Growing] = {}  # by stripe and slot
        self._windows: dict[tuple[int, int, int], Window] = {}  # by stripe, slot and size
        self._lock = threading.RLock()

    def of(self, number: int) -> int:
        """Return the memfd of a stripe, which is made if there is none."""
        with self._lock:
            if number not in self.descriptors:
                self.descriptors[number] = host_memory.create()
            return self.descriptors[number]

    def begin(self, number: int, piece: ParityPiece) -> "Coming":
        """Say where a piece is to go. Raises SaveError if it can't."""
        index = shard.parse_index(piece.member.index, piece.member.seal)
        if index.identity.rank != piece.rank or piece.rank not in piece.stripe.others():
            raise SaveError(f"Rank {piece.rank}'s state is not for this parity.")
        wanted = piece.stripe.cell_of(piece.rank, piece.member.seal.data_bytes)
        size = part_bytes(piece.member.seal.data_bytes, wanted)
        with self._lock:
            slot, growing = self._begun(number, piece, index)
            if growing.members.setdefault(piece.rank, piece.member) != piece.member:
                raise SaveError(f"Step {index.step} of rank {piece.rank} came twice, with other data.")
            if size > growing.data_bytes:
                self._refuse_too_much(number, size)
                host_memory.reserve(self.of(number), slot, size)
                growing.data_bytes = size
            window = self._window(number, slot, size)
        return Coming(index, wanted, size, growing.sum, window, number, slot)

    def arrived(self, one: "Coming") -> None:
        """A piece is all in it: once all members' are, the parity is whole."""
        with self._lock:
            growing = self._growing.get((one.number, one.slot))
            if growing is not None and growing.sum is one.sum:
                growing.there.add(one.index.identity.rank)
                if growing.there == growing.stripe.others():
                    self._seal(one.number, one.slot, growing, one.index)

    def has(self) -> list[HeldParity]:
        """Return what is whole here, as far as seals and indexes tell."""
        return [
            HeldParity(
                one.stripe.group,
                one.stripe.place,
                one.step,
                one.timeline,
                seal.size,
                one.job,
                one.world_size,
                one.stripe.copies,
                one.cut_among(),
            )
            for _, _, seal, one in self._whole()
        ]

    def find(self, stripe: Stripe, step: int, timeline: str) -> tuple[Seal, bytes, Window]:
        """Return a parity that `has` told of, with its index. Raises SaveError if it is not there."""
        for number, slot, seal, one in self._whole():
            if (one.stripe, one.step, one.timeline) == (stripe, step, timeline):
                encoded = host_memory.index_bytes(self.of(number), slot, seal)
                return seal, encoded, self._window(number, slot, seal.data_bytes)
        raise SaveError(
            f"Step {step} of ranks {sorted(stripe.others())} has no parity in this host's memory."
        )

    def drop_all(self) -> None:
        """Give up what is in it."""
        with self._lock:
            for number, descriptor in self.descriptors.items():
                for slot in SLOTS:
                    self._end(number, slot)
                    host_memory.unseal(descriptor, slot)

    def forget(self, number: int) -> None:
        """Give back all memory of a stripe."""
        with self._lock:
            for slot in SLOTS:
                self._end(number, slot)
            self._windows = {key: one for key, one in self._windows.items() if key[0] != number}
            if number in self.descriptors:
                os.close(self.descriptors.pop(number))

    def taken(self) -> int:
        """Return the bytes of memory that all of it takes now."""
        return sum(512 * os.fstat(one).st_blocks for one in list(self.descriptors.values()))

    def close(self) -> None:
        for number in list(self.descriptors):
            self.forget(number)

    def _whole(self) -> Iterator[tuple[int, int, Seal, ParityIndex]]:
        with self._lock:
            for number, descriptor in sorted(self.descriptors.items()):
                for slot, seal in host_memory.found(descriptor):
                    try:
                        index = parse_index(host_memory.index_bytes(descriptor, slot, seal), seal)
                    except SaveError:  # damaged: it is not whole
                        continue
                    yield number, slot, seal, index

    def _begun(self, number: int, piece: ParityPiece, index: Index) -> tuple[int, _Growing]:
        """Return the parity that a piece belongs to, which is begun if it is the first, and its slot."""
        wanted = (piece.stripe, index.step, index.timeline)
        for slot in SLOTS:
            known = self._growing.get((number, slot))
            if known is not None and (known.stripe, known.step, known.timeline) == wanted:
                return slot, known
            if known is not None and known.timeline == index.timeline and known.step > index.step:
                raise SaveError(
                    f"Step {index.step} of rank {piece.rank} comes too late: a newer one is there."
                )
        descriptor = self.of(number)
        seals = {slot: host_memory.seal_in(descriptor, slot) for slot in SLOTS}
        slot = min(SLOTS, key=lambda one: host_memory.worth(seals[one], piece.keep))
        self._end(number, slot)
        host_memory.unseal(descriptor, slot)
        growing = self._growing[number, slot] = _Growing(*wanted)
        return slot, growing

    def _end(self, number: int, slot: int) -> None:
        """Have nothing added any more to what is in a slot."""
        known = self._growing.pop((number, slot), None)
        if known is not None:
            known.sum.end()

    def _seal(self, number: int, slot: int, growing: _Growing, of_a_member: Index) -> None:
        digests = chunks.digests(self._window(number, slot, growing.data_bytes))
        index = ParityIndex(
            growing.stripe,
            growing.step,
            growing.timeline,
            of_a_member.identity.job,
            of_a_member.identity.world_size,
            growing.members,
            [one.hex() for one in digests],
        ).encode()
        host_memory.seal(self.of(number), slot, index, shard.seal_of(index, growing.step, growing.data_bytes))

    def _window(self, number: int, slot: int, size: int) -> Window:
        with self._lock:
            key = (number, slot, size)
            if key not in self._windows:
                place = host_memory.data_place(slot)
                self._windows[key] = chunks.window(self.of(number), place, size)
            return self._windows[key]

    def _refuse_too_much(self, number: int, size: int) -> None:
        needed = self._others() + self.taken() - 512 * os.fstat(self.of(number)).st_blocks + 2 * size
        if needed > self._limit:
            raise SaveError(
                f"To keep parity this host would need {needed} bytes of memory in all, and may use "
                f"{self._limit}: raise --memory-limit, or give the job hosts with more memory."
            )
