"""What replicas have of a state that was cut among them, put together: what they go on from (REFT-load).

The parts lie in this host's memory; those of other hosts were brought here before. Put together they are a
shard like any other, of no rank in particular, with nothing that a rank alone knows.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from jitckpt.errors import SaveError
from jitckpt.saves.folders import SavedState
from jitckpt.tiers import chunks, host_memory, shard
from jitckpt.tiers.host_memory import SLOTS, HostMemory
from jitckpt.tiers.shard import Index
from jitckpt.tiers.tier import Shard


def steps(memory: HostMemory, rank: int) -> Iterator[Index]:
    """Yield the index of each step that a rank has a part of, and of which all parts are in this memory."""
    held = {(one.rank, one.step, one.timeline) for one in memory.has()}
    if rank not in memory.descriptors:
        return
    descriptor = memory.of(rank)
    for slot, seal in host_memory.found(descriptor):
        try:
            index = host_memory.index_in(descriptor, slot, seal)
        except SaveError:  # damaged: it is not whole
            continue
        if index.cut is not None and all(
            (member, index.step, index.timeline) in held for member in index.cut.members
        ):
            yield index


def assemble(memory: HostMemory, of: Index, descriptor: int, slot: int) -> None:
    """Put what the members of a cut have of a step into a slot of another memfd.

    Each chunk is checked. Raises SaveError where parts are missing or damaged, or there is no room.
    """
    assert of.cut is not None
    host_memory.unseal(descriptor, slot)
    found = [memory.shard(rank, of.step, of.timeline) for rank in of.cut.members]
    indexes = [shard.parse_index(one.index, one.seal) for one in found]
    places = _places(indexes)
    size = max((end for *_, end in places.values()), default=0)
    host_memory.reserve(descriptor, slot, size)
    window = chunks.window(descriptor, host_memory.data_place(slot), size)
    whole = memoryview(window)
    copied: dict[str, list[range]] = {name: [] for name in places}
    for one, index in zip(found, indexes, strict=True):
        for name, elements in _copy(one, index, places, whole):
            copied[name].append(elements)
    for name, (_, shape, *_) in places.items():
        if not _are_all(copied[name], prod(shape)):
            raise SaveError(f"Step {of.step} in memory lacks a part of {name:.80}: replicas cut it unalike.")
    with chunks.of(of):
        digests = chunks.digests(window)
    put_together = replace(
        of,
        checksums=[digest.hex() for digest in digests],
        tensors={name: (kind, shape, begin) for name, (kind, shape, begin, _) in places.items()},
        host_from=size,
        document={},
        cut=None,
    ).encode()
    host_memory.seal(descriptor, slot, put_together, shard.seal_of(put_together, of.step, size))


def joined(own: SavedState, index: Index, whole: SavedState) -> SavedState:
    """Return the state of a rank that has a part of what its replicas hold alike, which is in `whole`."""
    assert index.cut is not None
    kept = {name: tensor for name, tensor in own.tensors.items() if name not in index.cut.parts}
    return SavedState(own.document, kept | whole.tensors)


_Place = tuple[str, list[int], int, int]  # type and shape of a whole tensor, and where it begins and ends


def _places(indexes: Sequence[Index]) -> dict[str, _Place]:
    """Return where each tensor goes that is cut. Raises SaveError if the parts are not of the same."""
    places: dict[str, _Place] = {}
    end = 0
    for index in indexes:
        assert index.cut is not None
        for name, (shape, _) in sorted(index.cut.parts.items()):
            kind = index.tensors[name][0]
            if name not in places:
                begin, end = end, end + prod(shape) * getattr(torch, kind).itemsize
                places[name] = (kind, list(shape), begin, end)
                end = shard.aligned(end)
                if end > shard.MOST_DATA:
                    raise SaveError(f"Step {index.step} in memory would have {end} bytes when put together.")
            elif places[name][:2] != (kind, list(shape)):
                raise SaveError(f"Step {index.step} in memory has two kinds of {name:.80}.")
    return places


def _copy(
    one: Shard, index: Index, places: dict[str, _Place], whole: memoryview
) -> Iterator[tuple[str, range]]:
    """Copy a member's parts; yield of which tensor they were which elements."""
    assert index.cut is not None
    with chunks.of(index):
        chunks.verify(one.window, index.digests)
    data = memoryview(one.window)
    for name, (_, first) in index.cut.parts.items():
        kind, (count,), offset = index.tensors[name]
        width = getattr(torch, kind).itemsize
        to = places[name][2] + first * width
        whole[to : to + count * width] = data[offset : offset + count * width]
        yield name, range(first, first + count)


def _are_all(parts: Sequence[range], size: int) -> bool:
    """Return whether each element is in one part."""
    end = 0
    for part in sorted(parts, key=lambda one: (one.start, one.stop)):
        if part.start != end:
            return False
        end = part.stop
    return end == size


class Assembled:
    """What was put together on this host, as ranks that start go on from it; by the members of the cut."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._descriptors: dict[tuple[int, ...], int] = {}

    def of(self, rank: int) -> int | None:
        """Return a memfd with all steps of which a rank's replicas have all parts here; None without one.

        Raises SaveError where a part is damaged, or there is no room.
        """
        found = list(steps(self._memory, rank))
        for index in found:
            assert index.cut is not None
            descriptor = self._made(tuple(index.cut.members))
            if not any(_is(descriptor, slot, index) for slot in SLOTS):
                newer = {one.step for one in found}
                free = [slot for slot in SLOTS if _step(descriptor, slot) not in newer]
                assemble(self._memory, index, descriptor, free[0])
        return None if not found else self._made(tuple(found[0].cut.members)) if found[0].cut else None

    def close(self) -> None:
        """Give the memory back."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _made(self, members: tuple[int, ...]) -> int:
        if members not in self._descriptors:
            self._descriptors[members] = host_memory.create()
        return self._descriptors[members]


def _step(descriptor: int, slot: int) -> int:
    seal = host_memory.seal_in(descriptor, slot)
    return 0 if seal is None else seal.step


def _is(descriptor: int, slot: int, index: Index) -> bool:
    """Return whether a slot has that step put together."""
    seal = host_memory.seal_in(descriptor, slot)
    if seal is None or seal.step != index.step:
        return False
    return host_memory.index_in(descriptor, slot, seal).timeline == index.timeline
