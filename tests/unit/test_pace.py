"""How often snapshots are made and how fast they are sent."""

import math
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.agent.pacer import Pacer
from jitckpt.decisions import pace
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import RULE, STEP_TIME
from jitckpt.worker.saving.rhythm import Rhythm

SECONDS = st.floats(1e-4, 1e4)


@given(SECONDS, SECONDS)
def test_the_number_of_steps_is_the_least_that_carries_a_snapshot(snapshot: float, step: float) -> None:
    every = pace.steps_between(snapshot, step)
    if every < pace.MOST_EVERY:
        assert snapshot <= pace.SHARE * every * step * (1 + 1e-9)
    assert every == 1 or snapshot > pace.SHARE * (every - 1) * step * (1 - 1e-9)


@given(st.floats(1, 1e12), SECONDS, SECONDS)
def test_what_is_sent_at_the_rate_is_there_in_time(size: float, copied: float, between: float) -> None:
    rate = pace.rate(size, copied, between)
    if math.isfinite(rate):
        assert copied + size / rate <= pace.SHARE * between * (1 + 1e-9)
    else:
        assert copied >= pace.SHARE * between


def test_a_training_that_waits_has_it_sent_sooner_and_one_that_does_not_slower_again() -> None:
    share = pace.next_share(pace.SHARE, waited_seconds=0.1, between_seconds=1.0)
    assert pace.LEAST_SHARE < share < pace.SHARE
    for _ in range(100):
        share = pace.next_share(share, 0.1, 1.0)
    assert share == pace.LEAST_SHARE
    for _ in range(100):
        share = pace.next_share(share, 0.0, 1.0)
    assert share == pace.SHARE


@given(st.integers(0, pace.MOST_EVERY), st.integers(0, 1 << 47))
def test_a_rule_is_one_word(every: int, since: int) -> None:
    assert pace.unpacked(pace.packed(every, since)) == (every, since)


def test_the_rule_comes_from_what_was_measured_and_says_why() -> None:
    pacer = Pacer(0)
    for step, seconds in ((1, 0.9), (5, 0.25), (9, 0.24)):
        assert pacer.planned(step) == {}
        pacer.measured(step, seconds / 2, 0.0)  # a rank that is sooner, and knows nothing of steps
        pacer.measured(step, seconds, 0.1)
    told = pacer.planned(9)
    assert (told["every"], told["since"]) == (4, 13)
    assert told["why"] == (
        "a snapshot after every 4 steps, since one takes 0.25 s beside the training until it is whole "
        "everywhere, and a step 0.1 s"
    )
    pacer.rule = (told["every"], told["since"])
    assert pacer.planned(9) == {}, "once is enough"


def test_a_snapshot_that_was_left_out_doubles_the_steps_once() -> None:
    pacer = Pacer(0)
    pacer.rule = (4, 13)
    told = pacer.doubled(21)
    assert (told["every"], told["since"]) == (8, 25)
    pacer.rule = (8, 25)
    assert pacer.doubled(21) == {}, "another rank tells of the same"


def test_what_the_user_has_said_stays() -> None:
    pacer = Pacer(3)
    for step in (3, 6, 9, 12):
        pacer.measured(step, 100.0, 0.1)
        assert pacer.planned(step) == pacer.doubled(step) == {}
    assert pacer.rule == (3, 0)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = host_memory.create()
    yield descriptor
    os.close(descriptor)


def due(rhythm: Rhythm, steps: range) -> list[int]:
    return [step for step in steps if rhythm.is_due(step)]


def test_a_rank_changes_over_at_the_step_that_all_change_over(memory: int) -> None:
    rhythm = Rhythm(memory, 0)
    assert due(rhythm, range(1, 11)) == [1, 5, 9]
    host_memory.put_word(memory, RULE, pace.packed(3, 13))
    assert due(rhythm, range(11, 23)) == [13, 16, 19, 22]
    host_memory.put_word(memory, RULE, pace.packed(6, 25))
    assert due(rhythm, range(23, 38)) == [25, 31, 37]
    assert due(Rhythm(memory, 5), range(1, 12)) == [5, 10], "until a rule comes that is newer"


def test_the_agent_hears_what_a_step_takes_without_waits(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("jitckpt.worker.saving.rhythm.time.monotonic", lambda: now)
    rhythm = Rhythm(memory, 1)
    for step in range(1, 30):
        now += 0.25
        rhythm.is_due(step)
        assert host_memory.word(memory, STEP_TIME) == (250_000 if step > 1 else 0)
        now += 3.0
        rhythm.waited(3.0)


def found_itself(hosts: int = 2) -> Pacer:
    """Return one that has measured that a snapshot needs 4 steps."""
    pacer = Pacer(0, hosts=hosts)
    for step in (1, 5, 9):
        pacer.measured(step, 0.25, 0.1)
    pacer.rule = (pacer.planned(9)["every"], 13)
    assert pacer.rule[0] == 4
    return pacer


def test_the_networks_idle_time_says_how_often_once_all_hosts_know_it() -> None:
    pacer = found_itself()
    pacer.idle_carries(0, 2, "it is idle for long")
    assert pacer.planned(17) == {}, "the other host has not told yet"
    pacer.idle_carries(1, 3, "it is idle for 0.05 s of a minibatch of 0.1 s")
    told = pacer.planned(17)
    assert (told["every"], told["since"]) == (3, 21)
    assert told["why"] == (
        "a snapshot after every 3 steps from now on, since it is idle for 0.05 s of a minibatch of 0.1 s"
    )
    pacer.rule = (3, 21)
    assert pacer.planned(24) == {}
    pacer.idle_carries(1, 5, "it is idle for less")
    assert pacer.planned(24)["every"] == 5


def test_idle_time_that_carries_too_little_leaves_what_was_measured() -> None:
    pacer = found_itself()
    pacer.idle_carries(0, 17, "")
    pacer.idle_carries(1, 1, "")
    assert pacer.planned(17) == {}, "more than 4 times as many steps"
    pacer.idle_carries(0, 0, "")
    assert pacer.planned(17) == {}
    pacer.idle_carries(0, 2, "")
    pacer.rule = (pacer.planned(17)["every"], 21)
    pacer.idle_carries(0, 0, "the training had to wait")
    told = pacer.planned(25)
    assert (told["every"], told["since"]) == (4, 27)
    assert "does not carry them" in told["why"]
    pacer.rule = (4, 27)
    assert pacer.planned(31) == {}


def test_what_was_too_often_once_is_not_tried_again() -> None:
    pacer = found_itself(hosts=1)
    pacer.idle_carries(0, 1, "")
    pacer.rule = (pacer.planned(17)["every"], 21)
    assert pacer.rule[0] == 1
    pacer.rule = (pacer.doubled(25)["every"], 26)
    assert pacer.rule[0] == 2
    assert pacer.planned(28) == {}
