"""What befalls jobs that the memory tier protects, and what is said of their ends."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaign import trials_in_memory
from campaign.runs_on_hosts import HostStrike
from campaign.trials_in_memory import (
    CUT,
    FULL,
    HOST,
    LONG_CUT,
    LOSSES,
    MEMORY_KINDS,
    MOST_HOSTS,
    PAIR,
    RANK,
    SECOND,
    SILENT,
    CutStrike,
    LossesStrike,
    SilentStrike,
    choose_trial,
    has_own_directories,
    judge,
    layout,
    missed,
    tier_of,
)
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions import memory_wanted
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.trials import Trial
from jitckpt.saves.final_state import FinalState
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import BEGUN, READY, SAFE
from jitckpt.tiers.shard import Seal

STRIKE = HostStrike(0, "memory_safe", 0.1)
TRIAL = Trial(1, HOST, (), (STRIKE,))
FINAL = {rank: FinalState(9, {"parameters": "aa"}, ()) for rank in range(3)}
RESTORED = {
    "event": "restored",
    "time": 4.0,
    "clock": 4.0,
    "restart": 1,
    "rank": 0,
    "step": 5,
    "in_memory": "x",
}
GOOD = Run(0, 9.0, (), FINAL, (RESTORED,), (STRIKE,), ())


@given(st.integers(0, 99), st.integers(0, 999), st.sampled_from((4, 8)), st.sampled_from(MEMORY_KINDS))
def test_trials_are_within_the_job_and_the_same_every_time(
    seed: int, number: int, ranks: int, kind: str
) -> None:
    trial, again = (
        choose_trial(seed, number, ranks=ranks, steps=40, step_seconds=0.1, kinds=[kind]) for _ in range(2)
    )
    hosts = len(layout(seed, number, ranks))
    assert trial == again
    assert trial.kind == kind
    assert len(trial.faults) == (kind in (RANK, FULL))
    assert len(trial.strikes) == {RANK: 0, FULL: 0, SECOND: 2}.get(kind, 1)
    assert all(0 <= strike.rank < hosts and strike.delay <= 2.0 for strike in trial.strikes)
    if kind == SECOND:
        assert trial.strikes[0].rank != trial.strikes[1].rank
        assert trial.strikes[1].restart == 1


@pytest.mark.parametrize("tier", ["peer", "peer=3", "parity", "sharded+parity=3", "peer=2+parity=4"])
def test_up_to_one_host_more_than_the_tier_survives_is_lost(tier: str) -> None:
    found = set()
    for number in range(200):
        hosts = len(layout(7, number, 8))
        trial = choose_trial(7, number, ranks=8, steps=40, step_seconds=0.1, kinds=[LOSSES], tier=tier)
        (strike,) = trial.strikes
        assert isinstance(strike, LossesStrike)
        lost = {strike.rank, *strike.others}
        assert len(lost) == 1 + len(strike.others) <= hosts
        assert strike.is_survived == (len(lost) <= memory_wanted.tier(tier).survived_losses(hosts))
        assert has_own_directories(trial) == strike.is_survived
        found.add((hosts, len(lost), strike.is_survived))
    most = memory_wanted.tier(tier).survived_losses(5)
    assert {(5, most, True), (5, most + 1, False), (2, 1, True), (2, 2, False)} <= found


@pytest.mark.parametrize(("tier", "event"), [("auto", "first_step"), ("peer", "memory_safe")])
def test_where_auto_may_keep_nothing_no_snapshot_is_waited_for(tier: str, event: str) -> None:
    trial = choose_trial(
        1, 1, ranks=4, steps=40, step_seconds=0.1, kinds=[HOST], tier=tier, has_replicas=True
    )
    assert [strike.event for strike in trial.strikes] == [event]


def test_each_trial_draws_its_tier_and_always_the_same() -> None:
    tiers = ("peer", "parity", "auto")
    drawn = [tier_of(3, number, tiers, 3) for number in range(60)]
    assert drawn == [tier_of(3, number, tiers, 3) for number in range(60)]
    assert set(drawn) == set(tiers)
    assert {tier_of(3, number, (*tiers, "peer=3", "peer=2+parity=4"), 2) for number in range(60)} == {
        "peer",
        "auto",
    }
    assert tier_of(3, 1, ("peer=3",), 2) == "peer"


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_are_spread_over_all_numbers_of_hosts(ranks: int) -> None:
    layouts = {layout(1, number, ranks) for number in range(100)}
    assert {len(one) for one in layouts} == set(range(2, min(MOST_HOSTS, ranks) + 1))
    assert all(sum(one) == ranks and min(one) > 0 for one in layouts)


def test_strikes_say_what_they_do() -> None:
    assert str(LossesStrike(2, "memory_safe", 0.5, others=(3,))) == (
        "host 2 dies with 3 500 ms after memory_safe"
    )
    assert str(CutStrike(0, "memory_safe", 0.5, seconds=20.0)) == (
        "host 0 is cut off for 20 s 500 ms after memory_safe"
    )
    assert str(SilentStrike(1, "memory_safe", 0.5)) == (
        "host 1 says nothing for 12 s 500 ms after memory_safe"
    )


def test_what_memory_has_brought_back_is_good(tmp_path: Path) -> None:
    assert judge(TRIAL, GOOD, GOOD, tmp_path).reason == ""
    assert not missed(TRIAL, GOOD)
    assert missed(TRIAL, replace(GOOD, struck=()))
    assert not missed(TRIAL, replace(GOOD, struck=(), events=())), "it never began"


def test_a_failure_that_came_when_all_ranks_had_ended_is_missed() -> None:
    """A slowed host's ranks are killed after a while, in which a quick training may end."""

    def told(name: str, rank: int, at: float) -> dict[str, Any]:
        return {"event": name, "time": at, "clock": at, "restart": 0, "rank": rank}

    ended = [told(name, rank, at) for name, at in (("registered", 1.0), ("finished", 3.0)) for rank in (0, 1)]
    killed = told("detected", 1, 4.0)
    assert missed(TRIAL, replace(GOOD, events=(*ended, killed)))
    assert not missed(TRIAL, replace(GOOD, events=(*ended[:-1], killed)))
    assert not missed(TRIAL, replace(GOOD, events=(*ended, killed | {"time": 2.0})))


def test_files_are_good_only_where_more_is_lost_than_copies_survive(tmp_path: Path) -> None:
    from_files = replace(GOOD, events=(RESTORED | {"in_memory": ""},))
    (tmp_path / "step-0000000005" / "rank-00000").mkdir(parents=True)
    assert judge(TRIAL, from_files, GOOD, tmp_path).reason == (
        "a rank went on from files; 1 saves were written"
    )
    pair = Trial(1, PAIR, (), (LossesStrike(0, "memory_safe", 0.1, others=(1,)),))
    assert not has_own_directories(pair)
    assert judge(pair, from_files, GOOD, tmp_path).reason == ""
    assert judge(pair, replace(GOOD, events=()), GOOD, tmp_path).reason == "", "from the beginning"


def test_what_a_replica_has_saved_serves_as_well(tmp_path: Path) -> None:
    from_files = replace(GOOD, events=(RESTORED | {"in_memory": ""},))
    (tmp_path / "step-0000000005" / "rank-00000").mkdir(parents=True)
    assert judge(TRIAL, from_files, GOOD, tmp_path, has_replicas=True).reason == ""
    nothing = replace(GOOD, events=())
    assert judge(TRIAL, nothing, GOOD, tmp_path, has_replicas=True).reason == ("no rank went on from a state")


def test_a_lost_hosts_own_state_is_missed_only_where_that_is_said(tmp_path: Path) -> None:
    other = replace(GOOD, final={**FINAL, 1: FinalState(9, {"parameters": "bb"}, ())})
    said = "rank 1: Rank 1 left no state of its own after step 5: random numbers come from rank 0"
    pair = Trial(1, PAIR, (), (LossesStrike(0, "memory_safe", 0.1, others=(1,)),))
    verdict = judge(pair, other, GOOD, tmp_path, has_replicas=True, said=said)
    assert (verdict.reason, verdict.note != "") == ("", True)
    for trial, words in ((pair, ""), (TRIAL, said)):
        assert judge(trial, other, GOOD, tmp_path, has_replicas=True, said=words).reason != ""
    assert judge(pair, other, GOOD, tmp_path, said=said).reason != "", "no replica has saved it"


def test_a_short_cut_needs_no_restart_and_a_lost_host_does(tmp_path: Path) -> None:
    nothing = replace(GOOD, events=())
    cut = Trial(1, CUT, (), (CutStrike(0, "memory_safe", 0.1),))
    assert judge(cut, nothing, GOOD, tmp_path).reason == ""
    silent = Trial(1, SILENT, (), (SilentStrike(0, "memory_safe", 0.1),))
    assert judge(silent, nothing, GOOD, tmp_path).reason == ""
    assert judge(TRIAL, nothing, GOOD, tmp_path).reason == "no rank went on from a state"


def test_a_host_that_was_cut_off_for_long_may_have_saved_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "step-0000000005" / "rank-00000").mkdir(parents=True)
    cut = Trial(1, LONG_CUT, (), (CutStrike(0, "memory_safe", 0.1, seconds=20.0),))
    assert judge(cut, GOOD, GOOD, tmp_path).reason == ""
    from_files = replace(GOOD, events=(RESTORED | {"in_memory": ""},))
    assert judge(cut, from_files, GOOD, tmp_path).reason == "a rank went on from files"


def test_another_end_is_never_good(tmp_path: Path) -> None:
    other = replace(GOOD, final={**FINAL, 1: FinalState(9, {"parameters": "bb"}, ())})
    for kind in MEMORY_KINDS:
        assert judge(Trial(1, kind, (), (STRIKE,)), other, GOOD, tmp_path).reason != ""


@pytest.mark.parametrize("in_copy", [True, False])
def test_the_moment_within_a_snapshot_is_awaited(monkeypatch: pytest.MonkeyPatch, in_copy: bool) -> None:
    memory = host_memory.create()
    monkeypatch.setattr(trials_in_memory, "_memories", lambda keeper: iter([memory]))
    host_memory.put_word(memory, READY, 1)
    waiting = threading.Thread(target=trials_in_memory._await_moment, args=(0,), kwargs={"in_copy": in_copy})
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    if in_copy:
        host_memory.put_word(memory, BEGUN, 3)
    else:
        host_memory.seal(memory, 0, b"{}", Seal(3, 0, 2, bytes(16)))
    waiting.join(60)
    assert not waiting.is_alive()
    assert host_memory.word(memory, SAFE) == 0
