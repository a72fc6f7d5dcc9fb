"""What replicas have of a cut state is put together bit for bit, or it is refused with a sentence."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_host_memory import window_of
from torch import Tensor

from jitckpt.decisions import cut
from jitckpt.encoding.tensor_file import bytes_of
from jitckpt.errors import SaveError
from jitckpt.saves.layout import Identity
from jitckpt.tiers import chunks, host_memory, own_shard, shard
from jitckpt.tiers.assembly import Assembled
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.tiers.shard import Cut, Index
from jitckpt.tiers.tier import Shard

RANKS = (0, 2, 3)  # of four
TENSORS = {
    "model.weight": torch.arange(1000, dtype=torch.float32).view(50, 20),
    "model.scale": torch.tensor(3.5, dtype=torch.float64),
    "model.none": torch.empty(0, 7),
    "optimizer.0.half": torch.arange(77, dtype=torch.bfloat16),
}


def identity(rank: int) -> Identity:
    return Identity("job", "fingerprint", 4, rank, 0, 2)


def part(
    rank: int,
    step: int = 4,
    *,
    timeline: str = "first",
    ranks: tuple[int, ...] = RANKS,
    of: Identity | None = None,
) -> Shard:
    """Return what a rank copies of these tensors, and a tensor of its own."""
    tensors: dict[str, Tensor] = {"own": torch.full((3,), rank)}
    places: dict[str, tuple[list[int], int]] = {}
    sizes = {name: tensor.nbytes for name, tensor in TENSORS.items()}
    for one in cut.parts(sizes, len(ranks), ranks.index(rank)):
        tensor = TENSORS[one.name]
        first, last = one.begin // tensor.itemsize, one.end // tensor.itemsize
        places[one.name] = (list(tensor.shape), first)
        tensors[one.name] = tensor.reshape(-1)[first:last] + (step - 4)
    data = b""
    where = {}
    for name, tensor in tensors.items():
        where[name] = (shard.dtype_name(tensor.dtype), list(tensor.shape), len(data))
        data += bytes(bytes_of(tensor.contiguous()))
        data += bytes(shard.aligned(len(data)) - len(data))
    window = window_of(data)
    checksums = [one.hex() for one in chunks.digests(window)]
    whose = identity(rank) if of is None else of
    made = Index(whose, step, timeline, 1.0, checksums, where, len(data), {"rank": rank}, Cut(ranks, places))
    return sealed(made, window, step % 2)


def sealed(index: Index, window: chunks.Window, slot: int = 0) -> Shard:
    encoded = index.encode()
    seal = shard.seal_of(encoded, index.step, window.size)
    return Shard(index.identity.rank, slot, seal, encoded, window)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    found = HostMemory()
    yield found
    found.close()


@pytest.fixture
def assembled(memory: HostMemory) -> Iterator[Assembled]:
    found = Assembled(memory)
    yield found
    found.close()


def whole_of(assembled: Assembled, rank: int) -> int:
    found = assembled.of(rank)
    assert found is not None
    return found


@pytest.mark.parametrize("rank", RANKS)
def test_each_replica_gets_all_of_it_and_its_own_beside(
    memory: HostMemory, assembled: Assembled, rank: int
) -> None:
    for one in RANKS:
        memory.put(part(one))
    _, state = own_shard.read(memory.of(rank), 4, whole_of(assembled, rank))
    assert state.document == {"rank": rank}
    assert state.tensors.pop("own").tolist() == [rank] * 3
    assert state.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor)


@given(st.integers(1, 4))
def test_any_number_of_members(count: int) -> None:
    memory = HostMemory()
    assembled = Assembled(memory)
    ranks = tuple(range(count))
    try:
        for one in ranks:
            memory.put(part(one, ranks=ranks))
        _, state = own_shard.read(memory.of(0), 4, whole_of(assembled, 0))
        assert all(torch.equal(state.tensors[name], tensor) for name, tensor in TENSORS.items())
    finally:
        assembled.close()
        memory.close()


def test_two_steps_are_put_together_once_and_newer_ones_in_the_place_of_older(
    memory: HostMemory, assembled: Assembled
) -> None:
    for step in (4, 5):
        for one in RANKS:
            memory.put(part(one, step))
    descriptor = whole_of(assembled, 0)
    assert {seal.step for _, seal in host_memory.found(descriptor)} == {4, 5}
    before = [seal for _, seal in host_memory.found(descriptor)]
    assert whole_of(assembled, 2) == descriptor
    assert [seal for _, seal in host_memory.found(descriptor)] == before
    for one in RANKS:
        memory.put(part(one, 6))
    for step in (5, 6):
        _, state = own_shard.read(memory.of(3), step, whole_of(assembled, 3))
        assert torch.equal(state.tensors["model.weight"], TENSORS["model.weight"] + (step - 4))


def test_without_all_parts_a_step_is_offered_by_nobody(memory: HostMemory, assembled: Assembled) -> None:
    for one in RANKS[:2]:
        memory.put(part(one))
    memory.put(part(RANKS[2], timeline="second"))
    assert assembled.of(0) is None
    own = OwnShard(memory.of(0), identity(0), whole=None)
    assert own.offer() == ()
    assert own.reasons == ["Step 4 in memory is a part, and not all others are here."]
    with pytest.raises(SaveError, match="Step 4 in memory is a part, and not all others are on this host"):
        own_shard.read(memory.of(0), 4)


def test_with_all_parts_it_is_offered_and_written_to_files(
    memory: HostMemory, assembled: Assembled, tmp_path: Path
) -> None:
    for one in RANKS:
        memory.put(part(one))
    whole = whole_of(assembled, 2)
    own = OwnShard(memory.of(2), identity(2), whole=whole)
    assert own.offer() == ((4, "first"),)
    assert own.check(4)
    state = own.choice(4).in_memory
    assert state is not None
    assert torch.equal(state.tensors["model.weight"], TENSORS["model.weight"])
    path, _ = own_shard.write_save(memory.of(2), tmp_path, 4, 1, whole=whole)
    assert path.is_dir()


def test_a_damaged_part_is_refused(memory: HostMemory, assembled: Assembled) -> None:
    for one in RANKS:
        memory.put(part(one))
    slot, _ = next(host_memory.found(memory.of(3)))
    os.pwrite(memory.of(3), b"\xff", host_memory.data_place(slot) + 40)
    with pytest.raises(SaveError, match="Chunk 0 of step 4 of rank 3 is damaged"):
        assembled.of(0)


def changed(one: Shard, change: dict[str, object]) -> Shard:
    index = shard.parse_index(one.index, one.seal)
    assert index.cut is not None
    return sealed(replace(index, cut=replace(index.cut, **change)), one.window)  # type: ignore[arg-type]


def test_replicas_that_cut_it_unalike_are_refused(memory: HostMemory, assembled: Assembled) -> None:
    for one in RANKS:
        memory.put(part(one))
    unlike = part(3)
    index = shard.parse_index(unlike.index, unlike.seal)
    assert index.cut is not None
    parts = {name: (shape, max(0, begin - 1)) for name, (shape, begin) in index.cut.parts.items()}
    memory.put(changed(unlike, {"parts": parts}))
    with pytest.raises(SaveError, match=r"Step 4 in memory lacks a part of model.weight"):
        assembled.of(0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members": (2, 3)}, "it is cut among ranks"),
        ({"members": (0, 0)}, "it is cut among ranks"),
        ({"members": (0, 9)}, "it is cut among ranks"),
        ({"parts": {"unknown": ([3], 0)}}, "of unknown it has no part"),
        ({"parts": {"own": ([2], 0)}}, "the part of own would lie outside of it"),
        ({"parts": {"own": ([4], 2)}}, "the part of own would lie outside of it"),
        ({"parts": {"own": ([-2, -2], 0)}}, "the part of own would lie outside of it"),
        ({"parts": {"own": (["x"], 0)}}, "makes no sense"),
        ({"parts": {"own": 3}}, "makes no sense"),
    ],
)
def test_a_cut_that_makes_no_sense_is_refused(change: dict[str, object], says: str) -> None:
    one = changed(part(0), change)
    with pytest.raises(SaveError, match=says):
        shard.parse_index(one.index, one.seal)


def test_an_index_says_how_it_is_cut() -> None:
    one = part(2)
    told = json.loads(one.index)["cut"]
    assert told["members"] == list(RANKS)
    assert shard.parse_index(one.index, one.seal).encode() == one.index
