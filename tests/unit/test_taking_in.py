"""When hosts are taken in, whatever comes and goes, and what becomes of the global batch."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.decisions import elastic
from jitckpt.decisions.elastic import LASTING, MOST_DOUBLINGS, STEADY_SECONDS, StartBegun, next_look, pause
from jitckpt.decisions.recovery import Close, KnownJob, OrderSave, Outcome, Rank, can_take_in, decide

WAIT = 60.0
HOSTS = 4


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=40))
def test_a_host_that_comes_and_goes_makes_the_job_start_less_and_less_often(
    flaps: list[tuple[float, bool]],
) -> None:
    """Each time it is lost after a while, or is gone already as the others meet."""
    starts, now = [StartBegun(0.0, HOSTS - 1)], 0.0
    taken: list[float] = []
    short = 0
    for stays, comes in flaps:
        at = next_look(starts, HOSTS, {"flapping": now}, WAIT)
        assert at is not None
        assert at >= now + STEADY_SECONDS
        assert at >= starts[-1].at + WAIT * 2 ** min(short, MOST_DOUBLINGS)
        taken.append(at)
        starts.append(StartBegun(at, HOSTS if comes else HOSTS - 1, took_in=True))
        now = at + stays
        if comes:
            starts.append(StartBegun(now, HOSTS - 1))
        short = short + 1 if not comes or stays < LASTING * WAIT else 0
    for before, after in pairwise(taken):
        assert after - before >= WAIT


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(2, HOSTS)), min_size=1, max_size=20),
    st.dictionaries(st.text(max_size=2), st.floats(0, 1e6), max_size=3),
)
def test_who_waits_is_taken_in_once_and_in_the_end(
    begun: list[tuple[float, int]], waiting: dict[str, float]
) -> None:
    starts = [StartBegun(at, hosts) for at, hosts in sorted(begun)]
    at = next_look(starts, HOSTS, waiting, WAIT)
    if starts[-1].hosts == HOSTS or not waiting:
        assert at is None
        return
    assert at is not None
    assert at >= starts[-1].at + WAIT
    latest = max(min(waiting.values()) + STEADY_SECONDS, starts[-1].at + WAIT * 2**MOST_DOUBLINGS)
    assert at <= latest


def test_a_start_that_lasted_ends_the_patience() -> None:
    came_and_went = [StartBegun(0, 3), StartBegun(60, 4, took_in=True), StartBegun(61, 3)]
    assert pause(came_and_went, WAIT) == 2 * WAIT
    again = StartBegun(200, 4, took_in=True)
    assert pause([*came_and_went, again, StartBegun(201, 3)], WAIT) == 4 * WAIT
    lasted = [*came_and_went, again, StartBegun(200 + LASTING * WAIT, 3)]
    assert pause(lasted, WAIT) == WAIT
    assert pause([StartBegun(0, 4), StartBegun(1, 3), StartBegun(2, 2)], WAIT) == WAIT, (
        "hosts that were lost are no growth"
    )


@given(st.integers(1, 12), st.integers(1, 64), st.data())
def test_the_global_batch_stays_where_it_divides(of_each: int, everyone: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, everyone))
    part: Fraction = elastic.part_of_batch(of_each, everyone, ranks)
    assert elastic.micro_batches(of_each, everyone, ranks) >= of_each
    assert (part == 1) == (of_each * everyone % ranks == 0)
    assert abs(part - 1) * of_each * everyone * 2 <= ranks, "no other number of micro-batches is nearer"


def job(*ranks: Rank, **facts: Any) -> KnownJob:
    return KnownJob(ranks, now=0.0, save_deadline=60.0, restarts_left=0, takes_in=True, is_free=True, **facts)


def healthy(rank: int) -> Rank:
    return Rank(rank, registered=True, reachable=True)


def test_all_ranks_save_and_start_again_though_no_restart_is_left() -> None:
    both = job(healthy(0), healthy(1))
    assert can_take_in(both)
    assert decide(replace(both, alarmed=True)) == OrderSave((0, 1))
    ended = [replace(healthy(rank), exit_code=-9, told="kill", save="ended", saved_step=3) for rank in (0, 1)]
    over = replace(
        both, ranks=tuple(ended), alarmed=True, ending_since=1.0, local_state_written=True, whole_at=1.0
    )
    assert decide(over) == Close(Outcome.RESTART)
    assert decide(replace(over, is_free=False)) == Close(Outcome.FAILED)


@pytest.mark.parametrize(
    "other",
    [
        {"exit_code": 1},
        {"raised": True},
        {"dying": True},
        {"registered": False},
        {"reachable": False},
        {"finished": True},
    ],
)
def test_nobody_is_taken_in_while_a_rank_is_not_well_or_at_its_end(other: dict[str, Any]) -> None:
    assert not can_take_in(job(healthy(0), replace(healthy(1), **other)))


@pytest.mark.parametrize("fact", ["alarmed", "suspected", "interrupted"])
def test_a_failure_goes_before(fact: str) -> None:
    assert not can_take_in(job(healthy(0), healthy(1), **{fact: True}))
    assert not can_take_in(replace(job(healthy(0), healthy(1)), ending_since=1.0))


@settings(max_examples=10)
@given(st.integers(2, 9))
def test_no_host_that_waits_means_nobody_is_taken_in(ranks: int) -> None:
    assert not can_take_in(replace(job(*map(healthy, range(ranks))), takes_in=False))
