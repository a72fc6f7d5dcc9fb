"""Where trials are hit, and what is said of runs that went wrong."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt import rehearsal
from jitckpt.faults import FATAL_KINDS, parse_fault, phases_of
from jitckpt.final_state import FinalState
from jitckpt.rehearsal import Run, Strike, processes_with, unused_shared_memory
from jitckpt.trials import FROM_OUTSIDE, Trial, choose_trial, differences, judge, steps_of


def event(name: str, clock: float, restart: int, **details: object) -> dict[str, object]:
    return {"event": name, "time": clock, "clock": clock, "restart": restart, **details}


EVENTS = (
    event("job_started", 0.0, 0),
    event("first_step", 1.0, 0, rank=0, step=1),
    event("detected", 5.0, 0, first=True, text="rank 1 was killed by SIGKILL"),
    event("save_ordered", 5.0, 0),
    event("save_ended", 5.1, 0, rank=0, step=7, bytes=1000),
    event("saved", 5.1, 0, step=7),
    event("restart", 5.2, 1),
    event("restored", 8.0, 1, rank=0, step=7),
    event("first_step", 8.5, 1, rank=1, step=8),
    event("finished", 11.0, 1, rank=1, step=11),
)
FINAL = {rank: FinalState(11, {"parameters": "aa", "random numbers": f"b{rank}"}, ()) for rank in (0, 1)}
GOOD = Run(0, 12.0, ((1.0, 1),), FINAL, EVENTS, (), ())
TRIAL = Trial(1, "kill", ("rank=1 step=8 phase=forward kind=kill",), ())
TWICE = replace(TRIAL, strikes=(Strike(0, "save_ordered", 0.02),))


def test_a_good_run_has_no_reason_against_it() -> None:
    verdict = judge(TRIAL, GOOD, GOOD)
    assert (verdict.reason, verdict.step, verdict.redone, verdict.recovery_seconds) == ("", 7, 1, 3.5)
    assert (verdict.failure, verdict.failures) == (TRIAL.faults[0], 1)
    assert (steps_of(GOOD), GOOD.step_seconds) == (11, 1.0)


def final_of(rank: int, **changes: object) -> dict[int, FinalState]:
    return FINAL | {rank: replace(FINAL[rank], **changes)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (replace(GOOD, status=1), "ended with status 1"),
        (
            replace(GOOD, final=final_of(1, digests={"parameters": "ab", "random numbers": "b1"})),
            "rank 1: parameters differ",
        ),
        (replace(GOOD, final=final_of(0, step=10)), "rank 0 made 10 steps instead of 11"),
        (replace(GOOD, final={0: FINAL[0]}), "rank 1 did not come to its end"),
        (replace(GOOD, final={}), "rank 0 did not come to its end; rank 1 did not come to its end"),
        (replace(GOOD, events=EVENTS[:2]), "0 restarts, 0 failures detected"),
        (
            replace(
                GOOD, events=(*EVENTS[:5], event("save_ended", 5.1, 0, rank=2, step=8, bytes=1), *EVENTS[5:])
            ),
            "2 minibatches redone",
        ),
        (
            replace(GOOD, events=(*EVENTS[:4], event("not_saved", 5.1, 0, text="nobody could"), EVENTS[6])),
            "all minibatches redone",
        ),
        (
            replace(GOOD, events=(*EVENTS, event("detected", 12.0, 1, first=True, text="rank 0 hangs"))),
            "2 failures detected instead of 1",
        ),
        (replace(GOOD, left_behind=("process 12: python",)), "left behind process 12: python"),
    ],
)
def test_a_bad_run_is_told(run: Run, reason: str) -> None:
    assert judge(TRIAL, run, GOOD).reason == reason


def test_before_the_first_minibatch_nothing_can_be_lost() -> None:
    failed = event("save_failed", 5.1, 0, rank=0, reason="No minibatch is finished yet: there is nothing.")
    run = replace(GOOD, events=(*EVENTS[:4], failed, EVENTS[6], EVENTS[8]))
    assert judge(TRIAL, run, GOOD).reason == ""


def test_after_the_training_a_failure_costs_nothing_but_the_exit_status() -> None:
    finished = [event("finished", 4.0 + rank, 0, rank=rank, step=11) for rank in (0, 1)]
    run = replace(GOOD, status=1, events=(*EVENTS[:2], *finished, EVENTS[2]))
    assert judge(TRIAL, run, GOOD).reason == ""
    assert "differ" in judge(TRIAL, replace(run, final=final_of(1, digests={})), GOOD).reason
    one = replace(run, events=(*EVENTS[:2], finished[0], EVENTS[2]))
    assert "ended with status 1" in judge(TRIAL, one, GOOD).reason


def test_two_failures_may_take_all_replicas_but_change_no_result() -> None:
    lost = (*EVENTS[:4], event("not_saved", 5.1, 0, text="nobody could"), EVENTS[6], EVENTS[8])
    assert judge(TWICE, replace(GOOD, events=lost), GOOD).reason == ""
    assert "differ" in judge(TWICE, replace(GOOD, events=lost, final=final_of(1, digests={})), GOOD).reason


def test_parts_that_differ_by_nature_are_left_out() -> None:
    run = replace(GOOD, final=final_of(1, digests={"parameters": "aa", "random numbers": "??"}))
    assert differences(run, GOOD) == ["rank 1: random numbers differ"]
    assert differences(run, GOOD, ["random numbers"]) == []


def test_without_any_final_state_nothing_is_equal() -> None:
    run = replace(GOOD, final={})
    assert differences(run, run) == ["no rank has told its final state"]


@given(
    seed=st.integers(0, 99),
    number=st.integers(0, 999),
    size=st.tuples(st.integers(2, 8), st.integers(3, 100)),
    kinds=st.sets(st.sampled_from([FROM_OUTSIDE, *FATAL_KINDS]), min_size=1).map(sorted),
    more=st.tuples(st.booleans(), st.booleans()),
)
def test_trials_are_within_the_job_and_the_same_every_time(
    seed: int, number: int, size: tuple[int, int], kinds: list[str], more: tuple[bool, bool]
) -> None:
    (ranks, steps), (second, two) = size, more
    trial, again = (
        choose_trial(
            seed,
            number,
            ranks=ranks,
            steps=steps,
            step_seconds=0.1,
            kinds=kinds,
            second=second,
            two_at_once=two,
        )
        for _ in range(2)
    )
    assert trial == again
    assert trial.kind in kinds
    assert len(trial.faults) + len(trial.strikes) == 1 + two + second
    at_once = [*trial.faults, *trial.strikes[: len(trial.strikes) - second]]
    assert len({str(one).split()[0] for one in at_once}) == 1 + two, "different ranks"
    hit = [parse_fault(fault) for fault in trial.faults]
    assert all(fault.rank < ranks and 1 <= fault.step < steps and fault.phase != "any" for fault in hit)
    assert all(strike.rank < ranks and 0 <= strike.delay <= max(4.0, steps * 0.1) for strike in trial.strikes)
    if second and trial.strikes[-1].event == "save_ordered" and hit and ranks > len(hit):
        assert trial.strikes[-1].rank not in [fault.rank for fault in hit], "a rank that failed does not save"


def test_each_kind_has_its_phases() -> None:
    assert "allreduce" in phases_of("kill")
    assert "allreduce" not in phases_of("exception")


def test_a_strike_says_when_and_whom_it_hits() -> None:
    strike = Strike(3, "restart", 1.5, 1, signal.SIGSTOP)
    assert str(strike) == "rank=3 SIGSTOP 1500 ms after restart of restart 1"


def test_a_process_that_is_left_behind_is_found() -> None:
    mark = f"JITCKPT_REHEARSAL=test-{os.getpid()}"
    assert processes_with(mark) == []
    name, _, value = mark.partition("=")
    with subprocess.Popen(["sleep", "60"], env=os.environ | {name: value}) as sleeper:
        try:
            # A process that has just begun its program has no environment for a moment.
            end = time.monotonic() + 60
            while (sleeper.pid, "sleep") not in processes_with(mark):
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            sleeper.kill()
    assert processes_with(mark) == []


def test_shared_memory_is_left_behind_only_if_nobody_uses_it() -> None:
    before = set(os.listdir("/dev/shm"))
    path = Path(f"/dev/shm/jitckpt-test-{os.getpid()}")
    try:
        with path.open("w"):
            assert path.name not in unused_shared_memory(before)
        assert path.name in unused_shared_memory(before)
    finally:
        path.unlink()
    assert path.name not in unused_shared_memory(before)


def test_shared_memory_of_others_that_is_soon_removed_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listings = iter([["theirs"], ["theirs"], []])
    monkeypatch.setattr(rehearsal, "unused_shared_memory", lambda before: next(listings))
    assert rehearsal.lasting_shared_memory(set()) == []


def test_shared_memory_that_stays_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "STAY_SECONDS", 0.0)
    monkeypatch.setattr(rehearsal, "unused_shared_memory", lambda before: ["ours"])
    assert rehearsal.lasting_shared_memory(set()) == ["ours"]
