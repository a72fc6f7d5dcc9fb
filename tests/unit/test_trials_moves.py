"""What befalls jobs whose ranks move by CRIU, and what is said of their ends."""

from dataclasses import replace
from typing import Any

import pytest
from campaign.trials_of_moves import (
    BOTH,
    BOTH_SICK,
    DEVICE,
    FIRST_SICK,
    MOVE_KINDS,
    SICK,
    TWICE,
    came_too_late,
    choose_trial,
    devices_of_hosts,
    judge,
    options,
    ranks_of_hosts,
)
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.faults.injection import parse_fault
from jitckpt.rehearsal import trials_in_place
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.trials import Trial, TrialVerdict

STEPS = 24
EQUAL = TrialVerdict("", 3, 1, 2.0, 9.0, 1, "")


@given(st.integers(0, 99), st.integers(0, 999), st.sampled_from(MOVE_KINDS), st.integers(1, 5))
def test_trials_are_within_the_job_and_the_same_every_time(
    seed: int, number: int, kind: str, attempt: int
) -> None:
    trial, again = (choose_trial(seed, number, steps=STEPS, kinds=[kind], attempt=attempt) for _ in range(2))
    assert trial == again
    faults = [parse_fault(one) for one in trial.faults]
    assert len(faults) == {DEVICE: 1, BOTH_SICK: 4}.get(kind, 2)
    assert all(one.kind == DEVICE and one.step is not None and 2 <= one.step <= STEPS - 2 for one in faults)
    hosts = [one.rank // 2 for one in faults if one.rank is not None]
    of_both = {SICK: [1, 1], FIRST_SICK: [0, 0], TWICE: [1, 1], BOTH: [0, 1], BOTH_SICK: [0, 0, 1, 1]}
    assert hosts == of_both.get(kind, hosts)
    ranks, devices = ranks_of_hosts(trial), devices_of_hosts(trial)
    assert ranks == ((2, 2, 0, 0) if kind in (TWICE, BOTH_SICK) else (2, 2, 0))
    assert devices == (2 if kind in (FIRST_SICK, BOTH_SICK) else 3, *(2 for _ in ranks[1:]))
    assert ("--no-state-on-device" in options(trial)) == (kind == BOTH_SICK)


@pytest.mark.parametrize(
    ("trial", "here", "elsewhere"),
    [
        (Trial(1, DEVICE, (f"rank=1 step=3 phase=backward kind={DEVICE}",), ()), 1, 0),
        (Trial(1, DEVICE, (f"rank=2 step=3 phase=backward kind={DEVICE}",), ()), 0, 1),
        (choose_trial(0, 1, steps=STEPS, kinds=[SICK]), 0, 1),
        (choose_trial(0, 1, steps=STEPS, kinds=[FIRST_SICK]), 0, 1),
        (choose_trial(0, 1, steps=STEPS, kinds=[BOTH_SICK]), 0, 2),
        (choose_trial(0, 1, steps=STEPS, kinds=[TWICE]), 0, 2),
        (choose_trial(0, 1, steps=STEPS, kinds=[BOTH]), 1, 1),
    ],
)
def test_processes_must_have_been_made_anew(
    monkeypatch: pytest.MonkeyPatch, trial: Trial, here: int, elsewhere: int
) -> None:
    monkeypatch.setattr(trials_in_place, "judge", lambda *of, **named: EQUAL)
    events: list[dict[str, Any]] = [{"event": "worker_moved"}] * here + [{"event": "ranks_moved"}] * elsewhere
    run = Run(0, 9.0, (), {}, tuple(events), (), ())
    assert judge(trial, run, run).reason == ""
    missing = judge(trial, replace(run, events=tuple(events[1:])), run).reason
    assert "0 times in the place of 1" in missing or "1 times in the place of 2" in missing
    assert "two halves went on at once" in judge(trial, replace(run, halves=("x",)), run).reason
    other = replace(EQUAL, reason="parameters differ")
    monkeypatch.setattr(trials_in_place, "judge", lambda *of, **named: other)
    assert judge(trial, run, run).reason == "parameters differ"


def test_a_second_failure_that_was_ordered_and_never_came_was_too_late() -> None:
    trial = choose_trial(0, 1, steps=STEPS, kinds=[TWICE])
    first, second = ({"event": "fault", "fault": str(parse_fault(one)), "rank": 2} for one in trial.faults)
    begun: dict[str, Any] = {"event": "recovery_begun", "recovery": 1, "time": 1.0}
    ordered = Run(0, 9.0, (), {}, (first, begun, second), (), ())
    assert came_too_late(trial, ordered)
    assert not came_too_late(trial, replace(ordered, events=(first, begun, second, {**begun, "recovery": 2})))
    assert came_too_late(trial, replace(ordered, events=(first, begun)))


@pytest.mark.parametrize("kind", [SICK, TWICE])
def test_a_failure_that_comes_after_its_rank_has_moved_makes_another_trial(kind: str) -> None:
    """Devices break one by one: the last one's may not have come to its call when the others' ranks move."""
    trial = choose_trial(0, 1, steps=STEPS, kinds=[kind])
    faults = [{"event": "fault", "rank": rank} for rank in (2, 3)]
    events: list[dict[str, Any]] = [*faults, {"event": "ranks_moved", "ranks": [2, 3]}]
    run = Run(1, 9.0, (), {}, tuple(events), (), ())
    assert not came_too_late(trial, run)
    late = replace(run, events=(events[0], events[2], events[1]))
    assert came_too_late(trial, late) == (kind == SICK)
