"""What befalls jobs whose ranks move by CRIU, and what is said of their ends."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.faults.injection import parse_fault
from jitckpt.rehearsal import trials_in_place
from jitckpt.rehearsal.runs import Run
from jitckpt.rehearsal.trials import Trial, TrialVerdict
from jitckpt.rehearsal.trials_of_moves import (
    BOTH,
    DEVICE,
    MOVE_KINDS,
    SICK,
    TWICE,
    choose_trial,
    devices_of_hosts,
    judge,
    ranks_of_hosts,
)

STEPS = 24
EQUAL = TrialVerdict("", 3, 1, 2.0, 9.0, 1, "")


@given(st.integers(0, 99), st.integers(0, 999), st.sampled_from(MOVE_KINDS), st.integers(1, 5))
def test_trials_are_within_the_job_and_the_same_every_time(
    seed: int, number: int, kind: str, attempt: int
) -> None:
    trial, again = (choose_trial(seed, number, steps=STEPS, kinds=[kind], attempt=attempt) for _ in range(2))
    assert trial == again
    faults = [parse_fault(one) for one in trial.faults]
    assert len(faults) == (1 if kind == DEVICE else 2)
    assert all(one.kind == DEVICE and one.step is not None and 2 <= one.step <= STEPS - 2 for one in faults)
    hosts = [one.rank // 2 for one in faults if one.rank is not None]
    assert hosts == {SICK: [1, 1], TWICE: [1, 1], BOTH: [0, 1]}.get(kind, hosts)
    ranks, devices = ranks_of_hosts(trial), devices_of_hosts(trial)
    assert ranks == ((2, 2, 0, 0) if kind == TWICE else (2, 2, 0))
    assert devices == (3, *(2 for _ in ranks[1:]))


@pytest.mark.parametrize(
    ("trial", "here", "elsewhere"),
    [
        (Trial(1, DEVICE, (f"rank=1 step=3 phase=backward kind={DEVICE}",), ()), 1, 0),
        (Trial(1, DEVICE, (f"rank=2 step=3 phase=backward kind={DEVICE}",), ()), 0, 1),
        (choose_trial(0, 1, steps=STEPS, kinds=[SICK]), 0, 1),
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
