"""Where each rank's state comes from: the policy against brute force."""

import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.sources import RATES, Kind, Source, SourcePlan, confirmed, decide, shares

RANKS = range(3)
SOURCES = st.builds(
    Source,
    rank=st.sampled_from(RANKS),
    step=st.integers(1, 3),
    kind=st.sampled_from(Kind),
    timeline=st.sampled_from(["", "a", "b"]),
    host=st.integers(0, 2),
    bytes=st.sampled_from([0, 1000, 5000]),
)


def ways(sources: list[Source], failed: list[Source]) -> list[tuple[Source, ...]]:
    """Return every way to give each rank a source, all of one step and timeline."""
    by_rank = [[one for one in sources if one.rank == rank and one not in failed] for rank in RANKS]
    return [way for way in product(*by_rank) if len({(one.step, one.timeline) for one in way}) == 1]


@given(st.lists(SOURCES, max_size=12), st.data())
def test_the_policy_takes_the_newest_step_that_brute_force_finds(
    sources: list[Source], data: st.DataObject
) -> None:
    failed = [one for one in sources if data.draw(st.booleans())]
    possible = ways(sources, failed)
    plan = decide(RANKS, sources, failed)
    if plan is None:
        assert possible == []
        return
    chosen = tuple(plan.sources[rank] for rank in RANKS)
    assert chosen in possible
    newest = [way for way in possible if way[0].step == max(one[0].step for one in possible)]
    assert {one.step for one in chosen} == {newest[0][0].step} == {plan.step}
    assert {one.timeline for one in chosen} == {plan.timeline}
    assert not set(chosen) & set(failed)
    of_timeline = [way for way in newest if way[0].timeline == plan.timeline]
    for rank in RANKS:
        assert chosen[rank].kind == min(way[rank].kind for way in of_timeline), "the nearest"


@given(st.lists(SOURCES, max_size=12))
def test_all_hosts_that_know_the_same_decide_the_same(sources: list[Source]) -> None:
    shuffled = sorted(sources, key=lambda one: (one.host, one.bytes, -one.step))
    assert decide(RANKS, sources) == decide(RANKS, shuffled)


def plan_of(sources: list[Source], failed: list[Source]) -> SourcePlan:
    plan = decide([0, 1], sources, failed)
    assert plan is not None
    return plan


def test_a_failed_check_takes_a_source_out_and_it_is_decided_again() -> None:
    own = [Source(rank, 8, Kind.OWN_MEMORY, "a", rank) for rank in (0, 1)]
    peers = [Source(rank, 8, Kind.PEER_MEMORY, "a", 1 - rank, 10) for rank in (0, 1)]
    older = [Source(rank, 7, Kind.OWN_MEMORY, "a", rank) for rank in (0, 1)]
    files = [Source(rank, 5, Kind.FILES) for rank in (0, 1)]
    every = [*own, *peers, *older, *files]
    assert plan_of(every, []).sources == {0: own[0], 1: own[1]}
    assert plan_of(every, [own[1]]).sources == {0: own[0], 1: peers[1]}
    third = plan_of(every, [own[1], peers[1]])
    assert third.sources == {0: older[0], 1: older[1]}
    assert third.reason == (
        "all go on from step 7: ranks 0, 1 from their own host's memory. Step 8 is not whole: of rank 1 "
        "nothing of it is left. Step 8 of rank 1 in the memory of host 0 has failed its check. Step 8 of "
        "rank 1 in their own host's memory has failed its check"
    )
    assert plan_of(every, [own[1], peers[1], older[0]]).step == 5
    assert decide([0, 1], every, [own[1], peers[1], older[0], files[0]]) is None


def test_one_step_of_two_timelines_is_none() -> None:
    assert decide([0, 1], [Source(0, 4, Kind.OWN_MEMORY, "a"), Source(1, 4, Kind.OWN_MEMORY, "b")]) is None


def test_holders_share_what_is_to_be_sent() -> None:
    peers = [Source(rank, 3, Kind.PEER_MEMORY, "a", host, 100) for rank in (0, 1) for host in (2, 3)]
    assert {one.host for one in plan_of(peers, []).sources.values()} == {2, 3}


@given(st.integers(0, 1000), st.integers(1, 40))
def test_holders_of_a_shard_have_equal_parts_of_it(chunks: int, holders: int) -> None:
    parts = shares(chunks, holders)
    assert [number for part in parts for number in part] == [*range(chunks)]
    assert len(parts) == min(chunks, holders)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


def test_it_is_quick_for_a_thousand_ranks() -> None:
    ranks = range(1000)
    sources = [
        Source(rank, step, kind, "a", (rank + kind) % 125, 1 << 30)
        for rank in ranks
        for step in (41, 42)
        for kind in (Kind.OWN_MEMORY, Kind.PEER_MEMORY)
        if (rank, step) != (17, 42)
    ]
    began = time.perf_counter()
    plan = decide(ranks, sources)
    seconds = time.perf_counter() - began
    assert plan is not None
    assert plan.step == 41
    assert seconds < 5  # a machine that is busy; scripts/bench/memory_tier.py has the figure


@pytest.mark.parametrize(
    ("steps", "safe"),
    [([[1, 2], [2, 3]], 2), ([[1], [2]], 0), ([], 0), ([[3, 4], [3, 4], [4]], 4)],
)
def test_a_step_is_safe_where_all_have_it(steps: list[list[int]], safe: int) -> None:
    assert confirmed(steps) == safe


def test_every_kind_has_a_rate() -> None:
    assert set(RATES) == set(Kind)
