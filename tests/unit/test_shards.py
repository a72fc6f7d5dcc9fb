"""Which ranks hold the same part of the state."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from threading import Condition

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.errors import JitckptError
from jitckpt.state.shards import REPLICATE, Holding, Layout, Mesh, Part, agree, lay_out

SHAPE = (36, 36)  # divisible by every number of cuts below, so that different cuts are different elements


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    return Mesh(sizes, tuple(draw(st.permutations(range(prod(sizes))))))


@st.composite
def jobs(draw: st.DrawFn) -> list[Part]:
    """Tensors on one mesh, each with placements of its own."""
    mesh = draw(meshes())
    one = st.sampled_from([REPLICATE, "Shard(dim=0)", "Shard(dim=1)"])
    placements = st.tuples(*[one] * len(mesh.sizes))
    return [
        Part(f"tensor{index}", SHAPE, "torch.float32", mesh, draw(placements))
        for index in range(draw(st.integers(1, 3)))
    ]


def elements(part: Part, rank: int) -> frozenset[tuple[int, ...]]:
    """Return the elements that a rank holds, by cutting the tensor along one mesh dimension after another."""
    assert part.mesh is not None
    ranges = [range(size) for size in part.shape]
    for placement, size, place in zip(
        part.placements, part.mesh.sizes, part.mesh.coordinate(rank), strict=True
    ):
        if placement != REPLICATE:
            dimension = int(placement[len("Shard(dim=") : -1])
            width = len(ranges[dimension]) // size
            ranges[dimension] = ranges[dimension][place * width : (place + 1) * width]
    return frozenset(product(*ranges))


def holding(parts: list[Part], rank: int) -> Holding:
    common = frozenset.intersection(*(part.peers(rank) for part in parts))
    pieces = json.dumps([part.piece(rank) for part in parts])
    text = "; ".join(filter(None, (part.cut_by() for part in parts)))
    return Holding(pieces, (tuple(sorted(common)),), text=text)


def numbered_by_lowest_rank(keys: list[object]) -> tuple[int, ...]:
    order = list(dict.fromkeys(keys))
    return tuple(order.index(key) for key in keys)


@given(jobs())
def test_replicas_are_the_ranks_that_hold_the_same_elements(parts: list[Part]) -> None:
    assert parts[0].mesh is not None
    ranks = range(len(parts[0].mesh.ranks))
    found = lay_out([holding(parts, rank) for rank in ranks])
    assert found.shards == numbered_by_lowest_rank(
        [tuple(elements(part, rank) for part in parts) for rank in ranks]
    )
    assert found.count == len(set(found.shards))
    assert (found.text == "replicated") == (found.count == 1)
    for part in parts:
        for rank in ranks:
            same = {other for other in ranks if elements(part, other) == elements(part, rank)}
            assert part.peers(rank) == same


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), min_size=1, max_size=8))
def test_where_nothing_is_declared_replicas_have_the_same_pieces_and_values(
    ranks: list[tuple[str, str]],
) -> None:
    found = lay_out([Holding(pieces, values=values) for pieces, values in ranks])
    assert found.shards == numbered_by_lowest_rank(list(ranks))


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), st.data())
def test_a_declaration_joins_no_different_pieces_and_what_is_not_declared_stays_apart(
    pieces: list[str], data: st.DataObject
) -> None:
    ranks = range(len(pieces))
    groups = data.draw(st.lists(st.sets(st.sampled_from(ranks), min_size=1), max_size=4))
    holdings = [
        Holding(pieces[rank], tuple(tuple(group) for group in groups if rank in group) or ((rank,),))
        for rank in ranks
    ]
    found = lay_out(holdings).shards
    for one, other in product(ranks, ranks):
        if found[one] == found[other]:
            assert pieces[one] == pieces[other]
        elif pieces[one] == pieces[other]:
            assert not any({one, other} <= group for group in groups)


def test_pipeline_stages_of_the_same_names_are_no_replicas() -> None:
    data_parallel = [(0, 2), (1, 3), (0, 2), (1, 3)]
    found = lay_out([Holding("same", (group,)) for group in data_parallel])
    assert found == Layout((0, 1, 0, 1), "different tensors; replicas 0 2 | 1 3")
    assert found.alone() == []


def test_the_text_says_how_the_state_is_cut() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3), ("replicate", "shard"))
    parts = [Part("weight", (8, 8), "torch.float32", mesh, (REPLICATE, "Shard(dim=0)"))]
    found = lay_out([holding(parts, rank) for rank in range(4)])
    assert found.text == "replicate=2 Replicate(), shard=2 Shard(dim=0); replicas 0 2 | 1 3"
    assert lay_out([Holding(str(rank)) for rank in range(2)]).alone() == [0, 1]


def test_a_long_text_is_shortened_and_still_tells_layouts_apart() -> None:
    jobs = [[Holding(str(rank), text=f"{rank}") for rank in range(ranks)] for ranks in (500, 501)]
    texts = {lay_out(holdings).text for holdings in jobs}
    assert len(texts) == 2
    assert all(len(text) <= 300 for text in texts)


def test_a_mesh_has_as_many_ranks_as_places() -> None:
    with pytest.raises(ValueError, match=r"sizes \(2, 2\) can't be of the ranks \(0, 1, 2\)"):
        Mesh((2, 2), (0, 1, 2))


class ThreadStore:
    """What torch's store does, between threads."""

    def __init__(self, patience: float = 60.0) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = Condition()
        self.patience = patience

    def set(self, key: str, value: str, /) -> None:
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key: str, /) -> bytes:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, self.patience):
                raise RuntimeError(f"wait timeout, key: {key}")
            return self.values[key]


def test_all_ranks_agree_on_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = [Holding("a", ((0, 2),), text="cut"), Holding("b"), Holding("a", ((0, 2),)), Holding("b")]
    store = ThreadStore()

    class FirstAgreement:
        """Each thread stands for a process, whose agreement is its first."""

        made = 0

        def __setattr__(self, name: str, value: object) -> None:
            pass

    monkeypatch.setattr("jitckpt.state.shards._Agreements", FirstAgreement())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rank: agree(store, rank, 4, holdings[rank]), range(4)))
    assert found == [lay_out(holdings)] * 4


def test_a_rank_that_does_not_come_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(JitckptError, match=r"Call jitckpt\.init on every rank"):
        agree(ThreadStore(patience=0.01), 0, 2, Holding("a"))
