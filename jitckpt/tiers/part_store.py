"""The parts of other hosts' shards that a host keeps, in spare memory or in files without names.

Both have the form of host_memory.py, and may be held by the keeper. What is here is only lent: it is given up
as soon as the host has less room for it.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jitckpt.errors import SaveError
from jitckpt.tiers import chunks, host_memory, parts, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import PAGE, SLOTS, SPAN
from jitckpt.tiers.shard import Index, Seal, ShardPart
from jitckpt.wire.visits import HeldPart

AT_A_TIME = 16  # chunks that are sent, and written, before the next

Whole = tuple[int, Seal, Index]  # what is in a slot


def file_in(directory: Path) -> int:
    """Return a new file without a name, of the form of a memfd. Raises SaveError."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, PAGE + 2 * SPAN)
            os.pwrite(descriptor, host_memory.MAGIC, 0)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        raise SaveError(f"{directory} can't take parts of states: {error.strerror}.") from error
    return descriptor


class PartStore:
    """By rank."""

    def __init__(
        self, descriptors: dict[int, int], make: Callable[[], int], room: Callable[[], int], where: str
    ) -> None:
        """descriptors: from now on this object's. make: another one. room: bytes that all may take now.

        where: in words.
        """
        self.descriptors = descriptors
        self._make, self._room, self._where = make, room, where
        self._coming: set[int] = set()
        self._lock = threading.RLock()

    def has(self) -> list[HeldPart]:
        """Return what is whole here, as far as seals and indexes tell."""
        found = []
        with self._lock:
            for rank, descriptor in sorted(self.descriptors.items()):
                for _, seal, index in _whole(descriptor):
                    try:
                        if index.identity.rank == rank:
                            found.append(parts.told(index, seal))
                    except SaveError:  # damaged: it is not whole
                        continue
        return found

    @contextmanager
    def coming(
        self, rank: int, slot: int, seal: Seal, encoded: bytes
    ) -> Iterator[tuple[Index, Callable[[int, Window], None]]]:
        """Give the slot up; return what is called with each few chunks of the part. The end seals them.

        Raises SaveError if there is no room, or the index is not the seal's.
        """
        index = shard.parse_index(encoded, seal)
        if parts.told(index, seal).rank != rank:
            raise SaveError(f"A part of rank {index.identity.rank}'s state came as one of rank {rank}'s.")
        with self._lock:
            if rank in self._coming:
                raise SaveError(f"Another part of rank {rank}'s state is on its way here.")
            self._refuse_too_much(rank, seal)
            if rank not in self.descriptors:
                self.descriptors[rank] = self._make()
            descriptor = self.descriptors[rank]
            self._coming.add(rank)
        try:
            host_memory.unseal(descriptor, slot)
            host_memory.reserve(descriptor, slot, seal.data_bytes)

            def put(first: int, window: Window) -> None:
                place = host_memory.data_place(slot) + first * shard.CHUNK
                host_memory.write(descriptor, memoryview(window), place)

            yield index, put
            host_memory.seal(descriptor, slot, encoded, seal)
        finally:
            with self._lock:
                self._coming.discard(rank)
                self._forget_if_empty(rank)

    def find(self, rank: int, step: int, timeline: str) -> tuple[int, Seal, bytes]:
        """Return the slot, the seal and the index of a part. Raises SaveError if it is not there."""
        with self._lock:
            descriptor = self.descriptors.get(rank)
            for slot, seal, index in () if descriptor is None else _whole(descriptor):
                if (seal.step, index.timeline) == (step, timeline):
                    assert descriptor is not None
                    return slot, seal, host_memory.index_bytes(descriptor, slot, seal)
        raise SaveError(f"No part of rank {rank}'s step {step} is in {self._where} here.")

    def read(self, rank: int, slot: int, first: int, count: int, size: int) -> Window:
        """Return so many chunks of a part of so many bytes, unchecked. Raises SaveError."""
        with self._lock:
            if rank not in self.descriptors:
                raise SaveError(f"What was there of rank {rank}'s state has been given up.")
            descriptor = os.dup(self.descriptors[rank])
        try:
            return window_of(descriptor, slot, (first, count), size)
        finally:
            os.close(descriptor)

    def keep_within(self, size: int) -> list[int]:
        """Give up parts, those of the highest ranks first, until all take no more; return whose they were."""
        given_up = []
        with self._lock:
            for rank in sorted(self.descriptors, reverse=True):
                if self.taken() <= size:
                    break
                if rank not in self._coming:
                    self._close(rank)
                    given_up.append(rank)
        return given_up

    def drop(self, is_old: Callable[[HeldPart], bool]) -> list[int]:
        """Give up the parts that are; return of which ranks nothing is left."""
        with self._lock:
            for rank, descriptor in self.descriptors.items():
                for slot, seal, index in list(_whole(descriptor)) if rank not in self._coming else ():
                    if index.part is None or is_old(parts.told(index, seal)):
                        host_memory.unseal(descriptor, slot)
            return [rank for rank in list(self.descriptors) if self._forget_if_empty(rank)]

    def taken(self) -> int:
        """Return the bytes that all of it takes now."""
        with self._lock:
            return sum(512 * os.fstat(one).st_blocks for one in self.descriptors.values())

    def close(self) -> None:
        with self._lock:
            for rank in list(self.descriptors):
                self._close(rank)

    def _forget_if_empty(self, rank: int) -> bool:
        empty = (
            rank in self.descriptors
            and rank not in self._coming
            and not any(host_memory.seal_in(self.descriptors[rank], slot) for slot in SLOTS)
        )
        if empty:
            self._close(rank)
        return empty

    def _close(self, rank: int) -> None:
        os.close(self.descriptors.pop(rank))

    def _refuse_too_much(self, rank: int, seal: Seal) -> None:
        own = 512 * os.fstat(self.descriptors[rank]).st_blocks if rank in self.descriptors else 0
        needed, room = self.taken() - own + 2 * seal.size, self._room()
        if needed > room:
            raise SaveError(
                f"For parts of states this host would need {needed} bytes of {self._where} in all, and has "
                f"{max(0, room)}."
            )


def _whole(descriptor: int) -> Iterator[Whole]:
    for slot, seal in host_memory.found(descriptor):
        try:
            yield slot, seal, host_memory.index_in(descriptor, slot, seal)
        except SaveError:  # damaged: it is not whole
            continue


def window_of(descriptor: int, slot: int, of: tuple[int, int], size: int) -> Window:
    """Return chunks, the first of them and how many, of the data of so many bytes in a slot, unchecked.

    Raises SaveError if they can't be read.
    """
    begin, end = of[0] * shard.CHUNK, min(size, sum(of) * shard.CHUNK)
    try:
        data = os.pread(descriptor, end - begin, host_memory.data_place(slot) + begin)
    except OSError as error:
        raise SaveError(f"A part of a state can't be read: {error.strerror}.") from error
    if len(data) != end - begin:
        raise SaveError("A part of a state is cut off.")
    window = scratch(len(data))
    memoryview(window)[:] = data
    return window


def scratch(size: int) -> Window:
    """Return memory of this process for chunks on their way. Raises SaveError."""
    descriptor = host_memory.create()
    try:
        host_memory.reserve(descriptor, 0, size)
        return chunks.window(descriptor, host_memory.data_place(0), size)
    finally:
        os.close(descriptor)


def few(count: int) -> Iterator[tuple[int, int]]:
    """Yield where the chunks begin that go together, and how many they are."""
    for first in range(0, count, AT_A_TIME):
        yield first, min(AT_A_TIME, count - first)


def of_part(encoded: bytes, seal: Seal) -> tuple[Index, ShardPart]:
    """Return a part's index, and what it has of the shard. Raises SaveError."""
    index = shard.parse_index(encoded, seal)
    parts.told(index, seal)
    assert index.part is not None
    return index, index.part
