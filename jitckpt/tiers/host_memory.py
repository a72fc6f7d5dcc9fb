"""The tier in this host's memory: a memfd for each rank, which outlives the rank, its agent and both.

Page 0 has words: what the agent tells the rank of its snapshots, and the rank the agent. Then come two slots,
each of a page for the seal, the data, and the index behind it (shard.py). They are far apart, and take no
more memory than is written. Whoever writes a slot first takes its seal away and puts the new one on last; the
other slot stays whole meanwhile. So a process may be killed at any byte.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from jitckpt.decisions.snapshot_spans import CARRIED, WHERE
from jitckpt.errors import SaveError
from jitckpt.saves.folders import SavedState
from jitckpt.system.free_memory import free_memory
from jitckpt.tiers import chunks, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.shard import SEAL_BYTES, Index, Seal
from jitckpt.tiers.tier import Shard, Taker, Tier
from jitckpt.wire.visits import HeldShard

PAGE = 4096
MAGIC = b"JITCKPTM"
SPAN = 1 << 42  # bytes between the beginnings of the two slots
SLOTS = (0, 1)
MOST_OF_FREE = 0.9  # that may be taken at once
_WORD = struct.Struct("<Q")
# The words, by their offsets. By the agent: the newest step that is whole everywhere; the newest that nobody
# waits for any more; after which steps there is to be one (decisions/pace.py). By the rank: 1 once what is in
# the slots is of this start, or what it goes on from; the newest step that it left out; microseconds that its
# training has waited for snapshots; the step of which one was begun last; 1 if it makes no more, and none of
# its are to be used (the agent says it where another rank makes no more); microseconds that a step takes;
# what its script asks for (tiers/asked.py); when the newest minibatch began on the device, in ns of
# CLOCK_MONOTONIC; which number the profile of the network has (tiers/idle.py); 1 while the training waits.
# By the agent: whether gradients are wanted, too, since other hosts make the optimizer's steps again, or are
# to be counted; and 1 while it sends something, so that the rank says in the word before when it uses the
# network itself. By the rank again: microseconds that its device's stream has waited for copies to be made;
# bytes that were copied where, and microseconds of a minibatch that carries what
# (decisions/snapshot_spans.py); bytes that would go to another host that makes its optimizer's steps again;
# 0 as long as it is not known.
WORDS = tuple(8 * number for number in range(1, 30))
SAFE, SETTLED, READY, SKIPPED, WAITED, BEGUN, OFF, STEP_TIME = WORDS[:8]
RULE, COPIES, EVERY, LIMIT, KEEP, MINIBATCH, PROFILE, AWAITED = WORDS[8:16]
GRADIENTS, NETWORK_USED, SENDING, COPY_WAITED = WORDS[16:20]
COPIED, STEP_TIMES = WORDS[20:25], WORDS[25:28]
STEP_BYTES = WORDS[28]
NO_MORE = 1 << 62  # a step: a rank leaves out all that come, so nobody waits for any
NO_GRADIENTS, SEND_GRADIENTS, COUNT_GRADIENTS = range(3)


def create() -> int:
    """Return a new memfd for one rank, which child processes may inherit by number. Raises OSError."""
    descriptor = os.memfd_create("jitckpt-memory-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE + 2 * SPAN)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # whoever has it mapped relies on that
    os.pwrite(descriptor, MAGIC, 0)
    return descriptor


def is_one(descriptor: int) -> bool:
    """Return whether a descriptor is such a memfd, or a file without a name of the same form."""
    try:
        return (
            os.fstat(descriptor).st_size == PAGE + 2 * SPAN
            and os.pread(descriptor, len(MAGIC), 0) == MAGIC
            and (is_memory(descriptor) or os.fstat(descriptor).st_nlink == 0)
        )
    except OSError:
        return False


def is_memory(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:jitckpt-memory-tier")


def word(descriptor: int, which: int) -> int:
    """Return a word of page 0."""
    (value,) = _WORD.unpack(os.pread(descriptor, _WORD.size, which))
    return int(value)


def put_word(descriptor: int, which: int, value: int) -> None:
    """Write a word of page 0."""
    os.pwrite(descriptor, _WORD.pack(value), which)


def copied(descriptor: int) -> dict[str, int]:
    """Return the bytes of the rank's snapshots, by what the device did as they left it."""
    return {where: word(descriptor, which) for where, which in zip(WHERE, COPIED, strict=True)}


def minibatch_seconds(descriptor: int) -> dict[str, float]:
    """Return how long the rank's minibatches take of late, by what they carry; of what is known."""
    found = {carried: word(descriptor, which) for carried, which in zip(CARRIED, STEP_TIMES, strict=True)}
    return {carried: microseconds / 1e6 for carried, microseconds in found.items() if microseconds}


def seal_in(descriptor: int, slot: int) -> Seal | None:
    """Return the seal of what is whole in a slot; None if nothing is."""
    return shard.parse_seal(os.pread(descriptor, SEAL_BYTES, place(slot)))


def place(slot: int) -> int:
    """Return where a slot begins: its seal; a page behind it its data."""
    return PAGE + slot * SPAN


def unseal(descriptor: int, slot: int) -> None:
    """Give up what is in a slot."""
    os.pwrite(descriptor, bytes(SEAL_BYTES), place(slot))


def seal(descriptor: int, slot: int, encoded: bytes, made: Seal) -> None:
    """Write the index behind the data that lies in a slot, then its seal: now it is whole."""
    write(descriptor, encoded, _index_place(slot, made.data_bytes))
    os.pwrite(descriptor, made.encode(), place(slot))


def index_in(descriptor: int, slot: int, of: Seal) -> Index:
    """Return the index of what is whole in a slot. Raises SaveError if it is damaged."""
    return shard.parse_index(index_bytes(descriptor, slot, of), of)


def index_bytes(descriptor: int, slot: int, of: Seal) -> bytes:
    """Return the index of what is whole in a slot, unchecked. Raises SaveError if it is cut off."""
    return _read(descriptor, of.index_bytes, _index_place(slot, of.data_bytes))


def worth(seal_: Seal | None, kept: int) -> tuple[bool, int]:
    """Return how much what is in a slot is worth, to be compared; kept: the step that is not to be lost."""
    return (seal_ is not None and seal_.step == kept, 0 if seal_ is None else seal_.step)


def found(descriptor: int) -> Iterator[tuple[int, Seal]]:
    """Yield the slots that are whole, newest step first."""
    whole = [(slot, one) for slot in SLOTS if (one := seal_in(descriptor, slot))]
    yield from sorted(whole, key=lambda pair: -pair[1].step)


def check(descriptor: int, step: int) -> Index:
    """Read every byte of a shard and return its index. Raises SaveError if it is not whole."""
    slot, of = _find(descriptor, step)
    index = index_in(descriptor, slot, of)
    with chunks.of(index):
        chunks.verify(chunks.window(descriptor, data_place(slot), of.data_bytes), index.digests)
    return index


def read(descriptor: int, step: int) -> tuple[Index, SavedState]:
    """Return the state after a step, in memory of its own. Raises SaveError if it is not whole."""
    slot, of = _find(descriptor, step)
    index = index_in(descriptor, slot, of)
    data = torch.empty(of.data_bytes, dtype=torch.uint8, device="cpu")
    with chunks.of(index):
        window = chunks.window(descriptor, data_place(slot), of.data_bytes)
        chunks.copy(window, index.digests, data.numpy().data)
    return index, shard.state_of(index, data)


def _find(descriptor: int, step: int) -> tuple[int, Seal]:
    for slot, of in found(descriptor):
        if of.step == step:
            return slot, of
    raise SaveError(f"Step {step} is not whole in this host's memory.")


def data_place(slot: int) -> int:
    """Return where the data of a slot begin."""
    return place(slot) + PAGE


def _index_place(slot: int, data_bytes: int) -> int:
    return data_place(slot) + shard.aligned(data_bytes)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise SaveError("What is kept in memory is cut off.")
    return data


def reserve(descriptor: int, slot: int, size: int) -> None:
    """Have memory for a slot's data. Raises SaveError where there is none: later a signal would say so.

    Nor is the last of it taken: the kernel would end some process of this host for that, perhaps a rank.
    """
    place = data_place(slot)
    missing = size - _allocated(descriptor, place, size)
    if missing > 0 and missing > (free := int(free_memory() * MOST_OF_FREE)):
        raise SaveError(
            f"The memory tier needs {missing} bytes more of this host's memory, and may take {free} of what "
            "is free now: give the job more memory, or a smaller --memory-limit, or --memory-tier off."
        )
    try:
        if missing:
            os.posix_fallocate(descriptor, place, size)
    except OSError as error:
        raise SaveError(_no_memory(error)) from error


def _allocated(descriptor: int, place: int, size: int) -> int:
    """Return of how many of these bytes of a memfd there is memory."""
    found, at, end = 0, place, place + size
    while at < end:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # there is nothing more
                raise
            break
        at = min(end, os.lseek(descriptor, begin, os.SEEK_HOLE))
        found += max(0, at - begin)
    return found


def _no_memory(error: OSError) -> str:
    return f"The memory tier can't write: {error.strerror}. Give the job more memory, or --memory-tier off."


def write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Put bytes at a place. Raises SaveError where there is no memory left."""
    try:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[count:], offset + count
    except OSError as error:
        raise SaveError(_no_memory(error)) from error


class HostMemory(Tier):
    """The shards in this host's memory: of its own ranks, and those that it keeps for others."""

    def __init__(self, descriptors: dict[int, int] | None = None, limit: int | None = None) -> None:
        """descriptors: memfds by rank, from now on this object's. limit: bytes that others' may take."""
        self.descriptors = {} if descriptors is None else descriptors
        self.limit = limit
        # Is told, before something comes here, how much of the limit may be lent to others meanwhile.
        self.lend_at_most: Callable[[int], None] = lambda size: None
        self._windows: dict[tuple[int, int], Window] = {}  # by rank and slot, as they were last
        self._beginnings: dict[tuple[int, int], Window] = {}  # the same
        self._reserved: dict[tuple[int, int], int] = {}  # bytes of each slot's data that have memory

    def of(self, rank: int) -> int:
        """Return the memfd of a rank, which is made if there is none."""
        if rank not in self.descriptors:
            self.descriptors[rank] = create()
        return self.descriptors[rank]

    @contextmanager
    def coming(self, rank: int, slot: int, seal_: Seal, index: bytes) -> Iterator[tuple[Index, Window]]:
        descriptor = self.of(rank)
        unseal(descriptor, slot)
        parsed = shard.parse_index(index, seal_)
        if parsed.identity.rank != rank:
            raise SaveError(f"A shard of rank {parsed.identity.rank} came as that of rank {rank}.")
        self._refuse_too_much(descriptor, rank, seal_)
        self._reserve(rank, slot, seal_.data_bytes)
        yield parsed, self._window(rank, slot, seal_.data_bytes)
        seal(descriptor, slot, index, seal_)

    def put(self, shard_: Shard) -> None:
        with (
            self.coming(shard_.rank, shard_.slot, shard_.seal, shard_.index) as (index, window),
            chunks.of(index),
        ):
            chunks.copy(shard_.window, index.digests, window)

    def has(self) -> Sequence[HeldShard]:
        told = []
        for rank, descriptor in sorted(self.descriptors.items()):
            for slot, one in found(descriptor):
                try:
                    index = index_in(descriptor, slot, one)
                except SaveError:  # damaged: it is not whole
                    continue
                identity = index.identity
                if identity.rank == rank:
                    job = (identity.job, identity.world_size, identity.start)
                    members = () if index.cut is None else tuple(index.cut.members)
                    told.append(HeldShard(rank, one.step, index.timeline, one.size, *job, members))
        return told

    def timeline(self, rank: int, step: int) -> str:
        """Return of which start's minibatches a step here is. Raises SaveError if it is not there."""
        descriptor = self._known(rank)
        slot, of = _find(descriptor, step)
        return index_in(descriptor, slot, of).timeline

    def shard(self, rank: int, step: int, timeline: str) -> Shard:
        """Return what is kept here, to be sent. Raises SaveError if it is not there."""
        descriptor = self._known(rank)
        slot, of = _find(descriptor, step)
        encoded = index_bytes(descriptor, slot, of)
        if shard.parse_index(encoded, of).timeline != timeline:
            raise SaveError(f"Step {step} of rank {rank} in this host's memory is of another start.")
        return Shard(rank, slot, of, encoded, self._window(rank, slot, of.data_bytes))

    def get(self, rank: int, step: int, timeline: str, into: Taker) -> int:
        one = self.shard(rank, step, timeline)
        with into.coming(rank, one.slot, one.seal, one.index) as (index, window), chunks.of(index):
            chunks.copy(one.window, index.digests, window)
        return one.seal.size

    def drop(self, rank: int, step: int) -> None:
        descriptor = self.descriptors.get(rank)
        for slot, one in [] if descriptor is None else found(descriptor):
            if one.step == step and descriptor is not None:
                unseal(descriptor, slot)

    def forget(self, rank: int) -> None:
        """Give back all memory of a rank."""
        for slot in SLOTS:
            self._windows.pop((rank, slot), None)
            self._beginnings.pop((rank, slot), None)
            self._reserved.pop((rank, slot), None)
        if rank in self.descriptors:
            os.close(self.descriptors.pop(rank))

    def taken(self) -> int:
        """Return the bytes of memory that all of it takes now."""
        return sum(512 * os.fstat(one).st_blocks for one in list(self.descriptors.values()))

    def reserved(self) -> int:
        """Return the bytes that it takes once each rank has two snapshots here."""
        size = 0
        for descriptor in list(self.descriptors.values()):
            newest = max((one.size for _, one in found(descriptor)), default=0)
            size += max(2 * newest, 512 * os.fstat(descriptor).st_blocks)
        return size

    def close(self) -> None:
        for rank in list(self.descriptors):
            self.forget(rank)

    def _known(self, rank: int) -> int:
        if rank not in self.descriptors:
            raise SaveError(f"This host's memory has nothing of rank {rank}.")
        return self.descriptors[rank]

    def beginning(self, rank: int, slot: int, size: int) -> Window:
        """Return the first bytes of a slot's data."""
        return self._kept_window(self._beginnings, rank, slot, size)

    def _window(self, rank: int, slot: int, size: int) -> Window:
        return self._kept_window(self._windows, rank, slot, size)

    def _kept_window(self, kept: dict[tuple[int, int], Window], rank: int, slot: int, size: int) -> Window:
        """Return the data of a slot: the same as before if they are as long, which they mostly are."""
        known = kept.get((rank, slot))
        if known is None or known.size != size:
            known = kept[rank, slot] = chunks.window(self.of(rank), data_place(slot), size)
        return known

    def _reserve(self, rank: int, slot: int, size: int) -> None:
        """Have memory for a slot's data, once: to see that all of it is there takes as long as to read it."""
        if self._reserved.get((rank, slot), 0) < size:
            reserve(self.of(rank), slot, size)
            self._reserved[rank, slot] = size

    def _refuse_too_much(self, descriptor: int, rank: int, of: Seal) -> None:
        if self.limit is None:
            return
        others = self.taken() - 512 * os.fstat(descriptor).st_blocks
        needed = others + 2 * of.size
        if needed > self.limit:
            raise SaveError(
                f"To keep rank {rank}'s state this host would need {needed} bytes of memory in all, "
                f"and may use {self.limit}: raise --memory-limit, or give the job hosts with more memory."
            )
        self.lend_at_most(self.limit - needed)
