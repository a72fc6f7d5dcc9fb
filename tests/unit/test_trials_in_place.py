"""Where trials of transparent mode are hit, and what is said of runs that went wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.faults.injection import TRANSPARENT_KINDS, parse_fault
from jitckpt.rehearsal.runs import Run, ServerStrike
from jitckpt.rehearsal.trials import Trial, TrialVerdict, differences
from jitckpt.rehearsal.trials_in_place import (
    AHEAD,
    BEGUN_ANEW,
    came_too_late,
    choose_trial,
    final_as_printed,
    judge,
)
from jitckpt.saves.final_state import FinalState


def event(name: str, clock: float, restart: int, **details: object) -> dict[str, object]:
    return {"event": name, "time": clock, "clock": clock, "restart": restart, **details}


TRIAL = Trial(1, "sticky", ("rank=1 step=8 phase=forward kind=sticky",), ())
FINAL = {rank: FinalState(11, {"state": "aa"}, ()) for rank in (0, 1)}
UNDISTURBED = Run(0, 10.0, (), FINAL, (), (), ())
IN_PLACE = Run(
    0,
    12.0,
    (),
    FINAL,
    (
        event("job_started", 0.0, 0),
        event("proxy_connected", 1.0, 0, rank=0, pid=10),
        event("proxy_connected", 1.0, 0, rank=1, pid=11),
        event("fault", 4.9, 0, rank=1, fault=TRIAL.faults[0], step=8, phase="forward"),
        event("device_alarm", 5.0, 0, rank=1, call=0, text="its server was ended by Killed"),
        event("recovery_begun", 5.0, 0, recovery=1),
        event("rank_stopped", 5.1, 0, rank=0, recovery=1, states=[7, 8], ended=8, seconds=0.1),
        event("rank_stopped", 5.1, 0, rank=1, recovery=1, states=[6, 7], ended=7, seconds=0.1),
        event("recovered", 7.5, 0, recovery=1, state=7, seconds=2.5),
    ),
    (),
    (),
)
ALL_HAD_ENDED = replace(
    IN_PLACE,
    events=tuple({**one, "ended": 8} if one["event"] == "rank_stopped" else one for one in IN_PLACE.events),
)
RESTARTED = replace(IN_PLACE, events=(*IN_PLACE.events, event("restart", 8.0, 1)))


@given(st.integers(), st.integers(1, 10), st.integers(2, 8), st.booleans(), st.booleans())
def test_trials_in_place_are_ones_that_can_happen(
    seed: int, number: int, ranks: int, second: bool, two_at_once: bool
) -> None:
    trial = choose_trial(
        seed, number, ranks=ranks, steps=8, kinds=TRANSPARENT_KINDS, second=second, two_at_once=two_at_once
    )
    faults = [parse_fault(text) for text in trial.faults]
    assert len({fault.rank for fault in faults}) == len(faults) == 1 + two_at_once
    assert all(fault.kind in TRANSPARENT_KINDS and fault.step <= 5 for fault in faults)
    assert all(0 <= fault.rank < ranks for fault in faults)
    assert [type(strike) for strike in trial.strikes] == [ServerStrike] * second
    assert ("server SIGKILL" in str(trial)) == second
    # Half of the steps are still to come when a second failure does.
    assert not second or all(fault.step <= 4 for fault in faults)


def test_each_attempt_at_a_trial_draws_another_and_always_the_same() -> None:
    def drawn(attempt: int) -> str:
        kinds = TRANSPARENT_KINDS
        options = {"ranks": 4, "steps": 40, "second": True, "two_at_once": False, "attempt": attempt}
        return str([choose_trial(7, number, kinds=kinds, **options) for number in range(20)])  # type: ignore[arg-type]

    assert len({drawn(attempt) for attempt in (1, 2, 3)}) == 3
    assert drawn(2) == drawn(2)


def test_a_failure_in_a_step_that_was_left_out_never_came() -> None:
    events = tuple(one for one in IN_PLACE.events if one["event"] != "fault")
    assert came_too_late(TRIAL, replace(IN_PLACE, events=events))
    in_two = replace(TRIAL, faults=(*TRIAL.faults, "rank=0 step=8 phase=forward kind=sticky"))
    assert came_too_late(in_two, IN_PLACE)


def test_a_second_failure_that_hit_nobody_or_was_not_seen_came_too_late() -> None:
    strike = ServerStrike(0, "calls_made_again", 0.1)
    trial = replace(TRIAL, strikes=(strike,))
    assert came_too_late(trial, IN_PLACE)
    # It hit a server that nobody needed any more.
    hit = replace(IN_PLACE, struck=(strike,))
    assert came_too_late(trial, hit)
    again = (event("recovery_begun", 6.0, 0, recovery=2), event("recovered", 8.5, 0, recovery=2, state=7))
    assert not came_too_late(trial, replace(hit, events=(*IN_PLACE.events, *again)))
    # It hit a server that was about to begin anew: that was replaced in the recovery under way.
    replaced = event("server_restarted", 6.0, 0, rank=0, recovery=1, seconds=0.1, stays=False)
    events = (*IN_PLACE.events[:-1], replaced, IN_PLACE.events[-1])
    assert not came_too_late(trial, replace(hit, events=events))


def test_what_a_script_has_printed_of_its_end_is_read() -> None:
    output = "step 1: loss 2.5\nrank 1: final state ab\nstep 2: loss 2\nnoise\nrank 0: final state cd\n"
    final = final_as_printed(output)
    assert {rank: (one.step, one.digests["state"]) for rank, one in final.items()} == {
        1: (2, "ab"),
        0: (2, "cd"),
    }
    anew = "step 1: loss 2.5\n" + output
    assert final_as_printed(anew, restarts=1) == final
    assert final_as_printed(anew) != final, "the same step was made twice"
    other = final_as_printed(output.replace("2.5", "2.6"))
    assert differences(replace(IN_PLACE, final=final), replace(IN_PLACE, final=other)) != []


def test_a_run_that_went_on_in_place_has_no_reason_against_it() -> None:
    verdict = judge(TRIAL, IN_PLACE, UNDISTURBED)
    assert (verdict.reason, verdict.step, verdict.recovery_seconds, verdict.failures) == ("", 7, 2.5, 1)
    assert (verdict.redone, verdict.note) == (1, AHEAD), "rank 1 had not ended step 8, which rank 0 had"
    level = [{**one, "ended": 7} if one["event"] == "rank_stopped" else one for one in IN_PLACE.events]
    verdict = judge(TRIAL, replace(IN_PLACE, events=tuple(level)), UNDISTURBED)
    assert (verdict.reason, verdict.redone, verdict.note) == ("", 1, "")


def test_a_failure_after_the_end_of_a_rank_came_too_late() -> None:
    given_up = "A transparent recovery is impossible: rank 0 is gone: {}."
    for why, late in (
        ("its device proxy has hung up", True),
        ("its worker process ended with exit status 0", True),
        ("its worker process was killed by SIGKILL", False),
    ):
        last = event("recovery_given_up", 9.0, 0, text=given_up.format(why))
        assert came_too_late(TRIAL, replace(IN_PLACE, events=(*IN_PLACE.events, last))) == late
    assert not came_too_late(TRIAL, IN_PLACE)


def test_where_all_devices_of_a_shard_are_hit_the_job_may_begin_anew() -> None:
    def of(held_by: str, *faults: str, restarts: int = 1) -> TrialVerdict:
        text = f"no device has the state after step 7 of shard 0 any more, held by ranks {held_by}; a further"
        given_up = event("recovery_given_up", 6.0, 0, text=f"A transparent recovery is impossible: {text}")
        anew = [event("restart", 7.0, 1), event("proxy_connected", 8.0, 1, rank=0, pid=12)][: 2 * restarts]
        events = (*IN_PLACE.events[:8], given_up, *anew)
        return judge(
            replace(TRIAL, faults=(*TRIAL.faults, *faults)), replace(IN_PLACE, events=events), UNDISTURBED
        )

    other = "rank=0 step=8 phase=forward kind=sticky"
    assert (of("0, 1", other).reason, of("0, 1", other).note) == ("", BEGUN_ANEW)
    assert "any more" in of("0, 1").reason, "rank 0 was not hit"
    assert of("0, 1").note == ""
    assert "any more" in of("0, 1", other, restarts=0).reason, "the job was given up for good"


def test_a_job_that_begins_anew_may_be_hit_before_all_its_ranks_are_there() -> None:
    def of(second: str) -> TrialVerdict:
        text = "no device has the state after step 7 of shard 0 any more, held by ranks 0, 1; a further"
        events = (
            *IN_PLACE.events[:8],
            event("recovery_given_up", 6.0, 0, text=f"A transparent recovery is impossible: {text}"),
            event("restart", 7.0, 1),
            event("recovery_begun", 8.0, 1, recovery=1),
            event("recovery_given_up", 8.0, 1, text=f"A transparent recovery is impossible: {second}."),
            event("restart", 9.0, 2),
        )
        both = replace(TRIAL, faults=(*TRIAL.faults, "rank=0 step=8 phase=forward kind=sticky"))
        return judge(both, replace(IN_PLACE, events=events), UNDISTURBED)

    waits = of("rank 1 is gone: it has not used its device yet")
    assert (waits.reason, waits.note) == ("", BEGUN_ANEW)
    assert "has hung up" in of("rank 1 is gone: its device proxy has hung up").reason


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (replace(IN_PLACE, status=1), "ended with status 1"),
        (
            replace(IN_PLACE, final=FINAL | {1: FinalState(11, {"state": "ab"}, ())}),
            "rank 1: state differ",
        ),
        (replace(IN_PLACE, events=IN_PLACE.events[:3]), "no recovery"),
        (
            replace(IN_PLACE, events=IN_PLACE.events[:2] + IN_PLACE.events[3:]),
            "1 processes have had a device, instead of 2",
        ),
        (RESTARTED, "the workers were started again"),
        (replace(IN_PLACE, left_behind=("/dev/shm/x",)), "left behind /dev/shm/x"),
        (ALL_HAD_ENDED, "2 minibatches redone"),
        (
            replace(
                IN_PLACE, events=(*IN_PLACE.events[:6], event("recovery_given_up", 6.0, 0, text="no, never"))
            ),
            "no, never",
        ),
    ],
)
def test_what_went_wrong_in_place_is_told(run: Run, reason: str) -> None:
    assert judge(TRIAL, run, UNDISTURBED).reason == reason
