"""Which variables are counters, and what is made up of them."""

from typing import Any

import pytest

from jitckpt.state import counters
from jitckpt.state.counters import LEAST_RAISED, Counters


def told(values: list[Any], *, rounds: int = 1000) -> bool:
    """Return whether a variable that has these values one after the other is a counter by then.

    rounds: of so many iterations each.
    """
    found = Counters()
    for number, value in enumerate(values):
        found.look({"script:main": {"step": value}}, same_round=number % rounds > 0)
    return bool(found.capture().tree == {"script:main": ["step"]})


ENOUGH = LEAST_RAISED + 1


@pytest.mark.parametrize(
    ("values", "is_counter"),
    [
        ([*range(7, 7 + ENOUGH)], True),
        ([*range(LEAST_RAISED)], False),
        ([*range(0, 2 * ENOUGH, 2)], False),
        ([*range(ENOUGH), 0, *range(ENOUGH)], False),
        ([*range(ENOUGH), ENOUGH - 1, *range(ENOUGH, 2 * ENOUGH)], False),
        ([*map(float, range(ENOUGH))], False),
        ([*range(ENOUGH), None], False),
        ([3] * ENOUGH, False),
        ([False, True, 2, 3, 4, 5, 6, 7], False),
    ],
)
def test_a_counter_is_what_every_iteration_has_raised_by_one(values: list[Any], is_counter: bool) -> None:
    assert told(values) == is_counter


def test_between_two_rounds_one_may_be_set_back() -> None:
    assert told([1, 2, 3, 1, 2, 3, 1, 2, 3], rounds=3)


def test_what_is_raised_between_two_rounds_is_none() -> None:
    assert not told([*range(50)], rounds=1)
    assert not told([1, 1, 1, 2, 2, 2, 3, 3, 3], rounds=3)


def test_one_is_told_by_the_same_object_while_none_is_new() -> None:
    found = Counters()
    every = []
    for number in range(2 * ENOUGH):
        found.look({"place": {"step": number, "other": 0}}, same_round=True)
        every.append(found.capture())
    assert all(one is every[0] for one in every[:LEAST_RAISED])
    assert all(one is every[-1] for one in every[LEAST_RAISED:])
    assert every[0].tree == {}


def test_after_a_restart_one_still_is() -> None:
    found = Counters()
    found.restore({"place": ["step"]})
    found.look({"place": {"step": 8}}, same_round=False)
    assert found.capture().tree == {"place": ["step"]}
    found.look({"place": {"step": 8}}, same_round=True)
    assert found.capture().tree == {}


def test_what_is_due_is_made_up() -> None:
    values: dict[str, dict[str, Any]] = {
        "place": {"step": 8, "total": 0.5, "name": "a"},
        "other": {"step": 3},
    }
    assert counters.made_up(values, {"place": ["step", "name", "gone"], "nowhere": ["step"]}) == {
        "place": {"step": 9, "total": 0.5, "name": "a"},
        "other": {"step": 3},
    }


def test_nothing_is_due_of_a_counter_that_was_raised_by_now() -> None:
    known = {"place": ["begun", "done", "gone"]}
    before = {"place": {"begun": 3, "done": 3, "gone": 3}}
    assert counters.without(known, {"place": {"begun": 4, "done": 3}}, before) == {"place": ["done"]}
