"""Ranks that CRIU writes to images and makes again at the same time."""

import os
import threading
from dataclasses import replace

import pytest

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.move import Dumped, Mover
from jitckpt.agent.migration.side_by_side import all_of, fitting, made_again, side_by_side
from jitckpt.bindings.criu import CriuError
from jitckpt.decisions.belongings import Carried


def test_calls_are_made_at_the_same_time_and_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    both = threading.Barrier(2)
    ended = []

    def call(number: int) -> int:
        both.wait(30)  # with the other one
        if number == 0:
            raise CriuError("It can't be dumped.")
        ended.append(number)
        return number

    found = side_by_side([lambda: call(0), lambda: call(1)])
    assert (str(found[0]), found[1], ended) == ("It can't be dumped.", 1, [1])
    with pytest.raises(CriuError, match=r"It can't be dumped\."):
        all_of(found)
    assert all_of(found[1:]) == [1]
    assert side_by_side([]) == []


def test_what_is_no_failure_of_a_rank_is_an_error() -> None:
    def wrong() -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        side_by_side([wrong])


def test_a_rank_that_could_not_be_made_again_beside_others_is_ended_and_tried_alone() -> None:
    """As two that have a file without a name in common can't be made again at once."""
    said: list[str] = []

    def make(rank: int) -> int:
        said.append(f"make {rank}")
        if rank == 2 or said.count(f"make {rank}") < min(rank, 2):
            raise CriuError(f"Rank {rank} can't be made again.")
        if rank == 3:
            raise OSError("no descriptor is left")
        return rank

    found = made_again([0, 1, 2, 3], make, lambda rank: said.append(f"end {rank}"))
    assert [str(one) for one in found] == [
        "0",
        "1",
        "Rank 2 can't be made again.",
        "no descriptor is left",
    ]
    assert sorted(said[:4]) == [f"make {rank}" for rank in range(4)]
    assert said[4:] == ["end 2", "make 2", "end 3", "make 3"]


@pytest.mark.parametrize(
    ("needed", "free", "parts"),
    [
        ([3, 3, 3], 9, [[0, 1, 2]]),
        ([3, 3, 3], 8, [[0, 1], [2]]),
        ([3, 3, 3], 3, [[0], [1], [2]]),
        ([5, 3], 3, [[0], [1]]),  # the first one was refused before, if it is too large
        ([0, 0], 0, [[0, 1]]),
        ([], 9, []),
    ],
)
def test_as_many_ranks_are_written_at_a_time_as_memory_has_room_for(
    needed: list[int], free: int, parts: list[list[int]]
) -> None:
    assert fitting(dict(enumerate(needed)), free) == parts


def test_ranks_go_into_memory_as_many_at_a_time_as_fit_and_one_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two fit, of which one can't be dumped; the third comes once both have ended."""
    monkeypatch.setattr(looked_at, "available_memory", lambda: 8)
    said: list[str] = []

    def dump(_: Mover, one: Dumped, limit: float) -> Dumped:
        said.append(f"begin {one.rank}")
        if one.rank == 5:
            raise CriuError("It can't be dumped.")
        said.append(f"end {one.rank}")
        return replace(one, pids=(one.rank,))

    monkeypatch.setattr(Mover, "_dump_one", dump)
    ready = [Dumped(rank, 0, Carried(), {}, needed=4) for rank in (3, 5, 7)]
    found = Mover.__new__(Mover).dump_all(ready)
    assert said[-2:] == ["begin 7", "end 7"]
    assert [str(one) if isinstance(one, CriuError) else one for one in found] == [
        replace(ready[0], pids=(3,)),
        "It can't be dumped.",
        replace(ready[2], pids=(7,)),
    ]
