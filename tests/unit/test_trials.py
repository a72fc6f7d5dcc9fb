"""Where trials are hit, and what is said of runs that went wrong."""

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.events import FILE_NAME
from jitckpt.faults.injection import FATAL_KINDS, parse_fault, phases_of
from jitckpt.rehearsal import runs
from jitckpt.rehearsal.runs import (
    CHECKPOINTS,
    LAUNCHER,
    MARK,
    NOBODY,
    FullDisk,
    Run,
    Strike,
    Unwritable,
    kill_running,
    processes_with,
    run_job,
    unused_shared_memory,
)
from jitckpt.rehearsal.trials import (
    FULL_DISK,
    LAUNCHER_KILLED,
    PREEMPTION,
    SAVE_CUT_OFF,
    STOPPING_KINDS,
    TRIAL_KINDS,
    UNWRITABLE,
    Trial,
    choose_trial,
    cut_off,
    differences,
    judge,
    judge_resumed,
    steps_of,
)
from jitckpt.saves.final_state import FinalState


def event(name: str, clock: float, restart: int, **details: object) -> dict[str, object]:
    return {"event": name, "time": clock, "clock": clock, "restart": restart, **details}


NEVER = event("fault_never_happened", 9.0, 0, rank=1, fault="rank=1 step=7 kind=kill")
EVENTS = (
    event("registered", 0.0, 0, rank=0),
    event("registered", 0.0, 0, rank=1),
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
TWICE = replace(TRIAL, strikes=(Strike(0, "save_ordered", 0.02),), must_be_saved=False)
LOST = (*EVENTS[:5], event("not_saved", 5.1, 0, text="nobody could"), EVENTS[7], EVENTS[9])


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
        (replace(GOOD, events=EVENTS[:3]), "0 restarts, 0 failures detected"),
        (
            replace(GOOD, events=(*EVENTS[:3], NEVER)),
            "0 restarts, 0 failures detected; the rehearsed failure never happened",
        ),
        (
            replace(
                GOOD, events=(*EVENTS[:6], event("save_ended", 5.1, 0, rank=2, step=8, bytes=1), *EVENTS[6:])
            ),
            "2 minibatches redone",
        ),
        (
            replace(GOOD, events=LOST),
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
    run = replace(GOOD, events=(*EVENTS[:5], failed, EVENTS[7], EVENTS[9]))
    assert judge(TRIAL, run, GOOD).reason == ""


def test_before_all_ranks_have_registered_no_minibatch_has_ended() -> None:
    early = (EVENTS[0], *LOST[2:])
    assert judge(TRIAL, replace(GOOD, events=early), GOOD).reason == ""
    again = event("detected", 12.0, 1, first=True, text="rank 0 hangs")
    registered = [event("registered", 11.0, 1, rank=rank) for rank in (0, 1)]
    twice = replace(TRIAL, strikes=(Strike(0, "restart", 0.02),))
    assert judge(twice, replace(GOOD, events=(*early, again)), GOOD).reason == ""
    events = (*early, *registered, again)
    assert "all minibatches redone" in judge(twice, replace(GOOD, events=events), GOOD).reason


def test_after_the_training_a_failure_costs_nothing_but_the_exit_status() -> None:
    finished = [event("at_end", 4.0 + rank, 0, rank=rank, step=11) for rank in (0, 1)]
    run = replace(GOOD, status=1, events=(*EVENTS[:3], *finished, EVENTS[3]))
    assert judge(TRIAL, run, GOOD).reason == ""
    assert "differ" in judge(TRIAL, replace(run, final=final_of(1, digests={})), GOOD).reason
    heard_late = replace(run, events=(*EVENTS[:3], finished[0], EVENTS[3], finished[1]))
    assert judge(TRIAL, heard_late, GOOD).reason == "", "a death may be heard before the last words"
    one = replace(run, events=(*EVENTS[:3], finished[0], EVENTS[3]))
    assert "ended with status 1" in judge(TRIAL, one, GOOD).reason


def test_two_failures_may_take_all_replicas_but_change_no_result() -> None:
    assert judge(TWICE, replace(GOOD, events=LOST), GOOD).reason == ""
    assert "differ" in judge(TWICE, replace(GOOD, events=LOST, final=final_of(1, digests={})), GOOD).reason
    others_live = replace(TWICE, must_be_saved=True)
    assert judge(others_live, replace(GOOD, events=LOST), GOOD).reason == "all minibatches redone"


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
    kinds=st.sets(st.sampled_from([*TRIAL_KINDS, *FATAL_KINDS]), min_size=1).map(sorted),
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
    hit = [parse_fault(fault) for fault in trial.faults]
    assert all(fault.rank < ranks and 1 <= fault.step < steps and fault.phase != "any" for fault in hit)
    assert all(strike.rank < ranks and 0 <= strike.delay <= max(4.0, steps * 0.1) for strike in trial.strikes)
    if trial.kind in STOPPING_KINDS:
        assert [strike.rank for strike in trial.strikes] == [LAUNCHER]
        assert trial.must_be_saved == (trial.cut is None) == (trial.kind != SAVE_CUT_OFF)
        return
    if trial.kind in (FULL_DISK, UNWRITABLE):
        (fault,), (disk,) = hit, trial.strikes
        assert (trial.failures, disk.rank == fault.rank) == (1, False)
        assert trial.must_be_saved == (trial.kind == FULL_DISK and ranks > 2)
        return
    assert trial.failures == len(trial.faults) + len(trial.strikes) == 1 + two + second
    at_once = [*trial.faults, *trial.strikes[: len(trial.strikes) - second]]
    assert len({str(one).split()[0] for one in at_once}) == 1 + two, "different ranks"
    if second and trial.strikes[-1].event == "save_ordered" and hit and ranks > len(hit):
        assert trial.strikes[-1].rank not in [fault.rank for fault in hit], "a rank that failed does not save"
    dead = {str(one).split()[0] for one in [*at_once, *(s for s in trial.strikes if not s.restart)]}
    assert trial.must_be_saved == (len(dead) < ranks)


def test_each_kind_has_its_phases() -> None:
    assert "allreduce" in phases_of("kill")
    assert "allreduce" not in phases_of("exception")


def test_a_strike_says_when_and_whom_it_hits() -> None:
    strike = Strike(3, "restart", 1.5, 1, signal.SIGSTOP)
    assert str(strike) == "rank=3 SIGSTOP 1500 ms after restart of restart 1"
    assert str(Strike(LAUNCHER, "first_step", 0.1)) == "launcher SIGKILL 100 ms after first_step"
    full = FullDisk(1, "first_step", 0.0, size=7)
    assert str(full) == "rank=1 disk full after 7 bytes 0 ms after first_step"
    unwritable = Unwritable(NOBODY, "first_step", 0.0)
    assert str(unwritable) == "checkpoint directory unwritable 0 ms after first_step"


STOPPED = replace(GOOD, status=-signal.SIGKILL, final={}, events=EVENTS[:2], steps=((1.0, 6), (1.1, 7)))
RESUMED = replace(GOOD, events=(EVENTS[0], event("restored", 1.0, 0, rank=0, step=7), *EVENTS[-1:]))
KILLED = Trial(1, LAUNCHER_KILLED, (), (Strike(LAUNCHER, "first_step", 0.1),))


def test_the_same_command_takes_a_job_up_again_whose_launcher_was_ended() -> None:
    verdict = judge_resumed(KILLED, STOPPED, RESUMED, GOOD, saved=7)
    assert (verdict.reason, verdict.step, verdict.redone, verdict.seconds) == ("", 7, 1, 24.0)
    asked = replace(KILLED, kind=PREEMPTION)
    assert judge_resumed(asked, replace(STOPPED, status=1), RESUMED, GOOD, saved=7).reason == ""
    saved = replace(STOPPED, status=75, events=(*STOPPED.events, event("saved", 1.0, 0, step=7)))
    assert judge_resumed(asked, saved, RESUMED, GOOD, saved=7).reason == ""
    unsaid = replace(saved, status=1)
    assert judge_resumed(asked, unsaid, RESUMED, GOOD, saved=7).reason == "ended with status 1 instead of 75"
    damaged = replace(KILLED, kind=SAVE_CUT_OFF, cut=(0.5, 0.5), must_be_saved=False)
    again = replace(RESUMED, events=(EVENTS[0], *EVENTS[-1:]))
    assert judge_resumed(damaged, STOPPED, again, GOOD, saved=7).reason == ""


@pytest.mark.parametrize(
    ("stopped", "resumed", "saved", "reason"),
    [
        (replace(STOPPED, status=1), RESUMED, 7, "ended with status 1 instead of -9"),
        (STOPPED, replace(RESUMED, status=1), 7, "ended with status 1 when it was taken up again"),
        (STOPPED, replace(RESUMED, final={}), 7, "rank 0 did not come to its end; rank 1 did not come to"),
        (STOPPED, RESUMED, 8, "2 minibatches redone"),
        (replace(STOPPED, steps=((1.0, 9),)), RESUMED, 7, "3 minibatches redone"),
        (replace(STOPPED, left_behind=("process 5",)), RESUMED, 7, "left behind process 5"),
        (STOPPED, replace(RESUMED, left_behind=("process 5",)), 7, "left behind process 5"),
        (STOPPED, replace(RESUMED, events=(EVENTS[3], RESUMED.events[1])), 7, "1 failures detected when it"),
    ],
)
def test_what_is_wrong_with_a_job_that_was_taken_up_again(
    stopped: Run, resumed: Run, saved: int, reason: str
) -> None:
    assert judge_resumed(KILLED, stopped, resumed, GOOD, saved=saved).reason.startswith(reason)


def test_a_strike_that_comes_too_late_is_missed() -> None:
    assert KILLED.missed(GOOD), "nobody was hit"
    hit = replace(STOPPED, struck=KILLED.strikes)
    assert not KILLED.missed(hit)
    assert KILLED.missed(replace(hit, final=FINAL)), "the training was at its end"
    outside = replace(TRIAL, strikes=(Strike(0, "first_step", 0.1),))
    late = replace(GOOD, struck=outside.strikes, events=())
    assert outside.missed(late), "it had told its end, and nobody noticed that it was killed then"
    assert not outside.missed(replace(late, final={}))
    assert not outside.missed(replace(late, events=EVENTS))
    assert not TWICE.missed(GOOD), "the second failure may come too late"


def test_a_save_is_cut_off_somewhere(tmp_path: Path) -> None:
    for name in ("rank-00000/state.json", "rank-00000/metadata.json", "local-00000/metadata.json"):
        (tmp_path / "step-0000000007" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "step-0000000007" / name).write_bytes(b"0123456789")
    file = cut_off(replace(KILLED, cut=(0.6, 0.35)), tmp_path)
    assert file == tmp_path / "step-0000000007/rank-00000/state.json"
    assert file.read_bytes() == b"012"


def test_a_disk_is_full_for_the_process_of_one_start(tmp_path: Path) -> None:
    mark = f"{MARK}=test-{os.getpid()}"
    program = "input(); file = open('file', 'wb', 0); file.write(bytes(9)); file.write(b'0')"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {MARK: f"test-{os.getpid()}"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        full = FullDisk(1, "first_step", 0.0, size=9)
        assert not full.happen(tmp_path, mark), "it has not registered"
        (tmp_path / CHECKPOINTS).mkdir()
        registered = event("registered", 1.0, 0, rank=1, pid=process.pid)
        (tmp_path / CHECKPOINTS / FILE_NAME).write_text(json.dumps(registered) + "\n")
        assert not replace(full, restart=1).happen(tmp_path, mark)
        while not full.happen(tmp_path, mark):  # it has not its environment yet
            time.sleep(0.01)
        _, said = process.communicate(b"\n")
    assert b"File too large" in said
    assert (tmp_path / "file").stat().st_size == 9
    assert not full.happen(tmp_path, mark), "it has ended"


def test_a_directory_can_t_be_written_until_the_restart(tmp_path: Path) -> None:
    directory = tmp_path / CHECKPOINTS
    directory.mkdir()
    (directory / FILE_NAME).touch()
    mark = f"{MARK}=test-{os.getpid()}"
    with subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark.removeprefix(f"{MARK}=")}) as sleeper:
        try:
            while not processes_with(mark):
                time.sleep(0.01)
            strike = Unwritable(NOBODY, "first_step", 0.0)
            thread = threading.Thread(target=strike.happen, args=(tmp_path, mark))
            thread.start()
            while directory.stat().st_mode & 0o200:
                time.sleep(0.01)
            with (directory / FILE_NAME).open("a") as events:
                events.write(json.dumps(event("restart", 1.0, 1)) + "\n")
            thread.join()
        finally:
            sleeper.kill()
    assert directory.stat().st_mode & 0o777 == 0o755


def test_jobs_of_other_threads_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "JITCKPT", [sys.executable, "-c", "import time; time.sleep(60)"])
    with ThreadPoolExecutor() as pool:
        run = pool.submit(run_job, [], tmp_path / "job")
        while not run.done():
            kill_running()
            time.sleep(0.01)
    assert run.result().status == -signal.SIGKILL


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
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            file.close()
            assert path.name not in unused_shared_memory(before), "it is mapped"
    finally:
        path.unlink()
    assert path.name not in unused_shared_memory(before)


def test_what_no_process_of_the_job_has_used_is_another_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STAY_SECONDS", 0.0)
    monkeypatch.setattr(runs, "SHARED_LOOK_SECONDS", 0.01)
    before = set(os.listdir("/dev/shm"))
    name, _, value = (mark := f"JITCKPT_REHEARSAL=test-{os.getpid()}").partition("=")
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as own,
        tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as others,
    ):
        pass
    try:
        with (
            runs.shared_memory_used_by(mark) as used,
            open(own.name) as file,
            subprocess.Popen(["sleep", "60"], stdin=file, env=os.environ | {name: value}) as sleeper,
        ):
            while not used:
                time.sleep(0.01)
            sleeper.kill()
        assert runs.lasting_shared_memory(before, used) == [Path(own.name).name]
        assert Path(others.name).name in runs.lasting_shared_memory(before)
    finally:
        for path in (own.name, others.name):
            Path(path).unlink()


def test_shared_memory_of_others_that_is_soon_removed_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listings = iter([["theirs"], ["theirs"], []])
    monkeypatch.setattr(runs, "unused_shared_memory", lambda before: next(listings))
    assert runs.lasting_shared_memory(set()) == []


def test_shared_memory_that_stays_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STAY_SECONDS", 0.0)
    monkeypatch.setattr(runs, "unused_shared_memory", lambda before: ["ours"])
    assert runs.lasting_shared_memory(set()) == ["ours"]
