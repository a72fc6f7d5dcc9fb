"""The order in which communicators are made anew."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.transparent.communicators import (
    Communicator,
    CommunicatorError,
    Creation,
    calls,
    creation_order,
)


def make(calls: Mapping[int, Sequence[Creation]]) -> set[int]:
    """Let each rank make its calls one after the other, each waiting for its callers; return who is stuck."""
    place = dict.fromkeys(calls, 0)

    def due(rank: int) -> Creation | None:
        return calls[rank][place[rank]] if place[rank] < len(calls[rank]) else None

    while True:
        ready = next(
            (
                call
                for rank in calls
                if (call := due(rank)) is not None and all(due(other) == call for other in call.callers)
            ),
            None,
        )
        if ready is None:
            return {rank for rank in calls if due(rank) is not None}
        for rank in ready.callers:
            place[rank] += 1


def groups_along(sizes: Sequence[int], dimensions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the groups of a row-major mesh's ranks that differ in these dimensions alone."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(product(*map(range, sizes))):
        fixed = tuple(at for dimension, at in enumerate(place) if dimension not in dimensions)
        ranks.setdefault(fixed, []).append(number)
    yield from (tuple(group) for group in ranks.values())


def communicators(sizes: Sequence[int], kinds: Sequence[Sequence[int]], split: bool) -> list[Communicator]:
    """Return the world's communicator and those along these dimensions, new ones or splits of the world."""
    world = Communicator("world", tuple(groups_along(sizes, range(len(sizes))).__next__()))
    found = [world]
    for number, dimensions in enumerate(kinds):
        for index, group in enumerate(groups_along(sizes, dimensions)):
            parent = "world" if split else ""
            found.append(Communicator(f"{number}.{index}", group, parent, number if split else 0))
    return found


def tables(found: Sequence[Communicator], ranks: int) -> dict[int, list[Communicator]]:
    """Return what each rank knows, in an order of its own."""
    known = {rank: [one for one in found if rank in one.members] for rank in range(ranks)}
    return {rank: own[(rank + 1) % len(own) :] + own[: (rank + 1) % len(own)] for rank, own in known.items()}


MESHES = [(2,), (4,), (2, 2), (3, 2), (2, 2, 2), (4, 2), (1, 3)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("sizes", MESHES)
def test_all_communicators_of_every_mesh_are_made(sizes: tuple[int, ...], split: bool) -> None:
    dimensions = [
        kind for length in range(1, len(sizes) + 1) for kind in combinations(range(len(sizes)), length)
    ]
    for count in range(len(dimensions) + 1):
        for kinds in combinations(dimensions, count):
            found = communicators(sizes, kinds, split)
            ranks = len(found[0].members)
            order = creation_order(tables(found, ranks))
            assert sorted(one.key for call in order for one in call.made) == sorted(one.key for one in found)
            assert make(calls(order)) == set()
            made: set[str] = set()
            for call in order:
                assert not call.parent or call.parent in made
                made |= {one.key for one in call.made}


def test_each_ranks_own_order_would_deadlock() -> None:
    """What the test above would say of an order that is not the same on all ranks."""
    one, other = (
        Creation((0, 1), (Communicator("a", (0, 1)),)),
        Creation((0, 1), (Communicator("b", (0, 1)),)),
    )
    assert make({0: [one, other], 1: [other, one]}) == {0, 1}


@given(st.lists(st.sets(st.integers(0, 7), min_size=1), max_size=8), st.randoms())
def test_any_groups_at_all(groups: list[set[int]], random: object) -> None:
    found = [Communicator(f"{n}", tuple(sorted(group))) for n, group in enumerate(groups)]
    order = creation_order({rank: [one for one in found if rank in one.members] for rank in range(8)})
    assert make(calls(order)) == set()
    assert len(order) == len(found)


def test_a_split_is_one_call_of_all_members_of_its_parent() -> None:
    world = Communicator("world", (0, 1, 2, 3))
    even, odd = Communicator("even", (0, 2), "world", 1), Communicator("odd", (1,), "world", 1)
    again = Communicator("again", (2, 0), "even")
    known = [world, even, odd, again]
    order = creation_order({rank: [one for one in known if rank in one.members] for rank in range(4)})
    assert order == (
        Creation((0, 1, 2, 3), (world,)),
        Creation((0, 1, 2, 3), (even, odd), "world"),
        Creation((0, 2), (again,), "even"),
    )
    assert calls(order)[3] == order[:2]


def test_a_split_outlives_what_it_was_split_from() -> None:
    pair = Communicator("pair", (0, 1), "destroyed", 3)
    order = creation_order({0: [pair], 1: [pair], 2: []})
    assert [call.callers for call in order] == [(0, 1)]
    assert order[0].parent == ""


def test_disagreements_are_named() -> None:
    pair = Communicator("pair", (0, 1))
    with pytest.raises(CommunicatorError, match=r"pair has the members .0, 1., but that does not fit rank 1"):
        creation_order({0: [pair], 1: []})
    with pytest.raises(CommunicatorError, match=r"Rank 1 says that .* pair has the members .1, 0."):
        creation_order({0: [pair], 1: [Communicator("pair", (1, 0))]})
    world = Communicator("world", (0, 1))
    twice = [Communicator("a", (0, 1), "world"), Communicator("b", (0,), "world")]
    with pytest.raises(CommunicatorError, match="Split 0 of the communicator world can't have made a, b"):
        creation_order({0: [world, *twice], 1: [world, twice[0]]})
    circle = [Communicator("a", (0,), "b"), Communicator("b", (0,), "a")]
    with pytest.raises(CommunicatorError, match="split from itself"):
        creation_order({0: circle})
    with pytest.raises(ValueError, match="can't have the members"):
        Communicator("empty", ())
