"""What befalls hosts that meet at etcd: when, whom, that it is undone, and what is said of bad runs."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from campaign import runs_on_hosts, trials_at_etcd
from campaign.etcd_members import EtcdMembers
from campaign.runs_on_hosts import HOSTS, HostStrike, JobOnHosts
from campaign.strikes_at_etcd import (
    BOTH,
    ClockJumps,
    CutOff,
    Lasting,
    MemberDies,
    MembersStop,
    OfMember,
    Stops,
)
from campaign.trials_at_etcd import HOST_STRIKES, KINDS, MEMBER_STRIKES, choose_trial, judge, missed
from hypothesis import given
from hypothesis import strategies as st
from test_trials_hosts import EVENTS, FINAL, GOOD, LOST, STEPS, Machines

from jitckpt.errors import HostsError
from jitckpt.faults.injection import parse_fault
from jitckpt.rehearsal.runs import OUTPUT, Run
from jitckpt.rehearsal.trials import Trial

STOP = Stops(1, "first_step", 0.1, seconds=8.0)
TRIAL = Trial(1, "stop-agent", (), (STOP,))
# What a host that stood still had printed comes late, and it may cost several restarts.
HEALED = replace(
    GOOD, struck=(STOP,), steps=(*STEPS, *STEPS), events=tuple({**one, "restart": 3} for one in EVENTS)
)


@given(st.integers(0, 99), st.integers(0, 999), st.sampled_from(trials_at_etcd.RANKS))
def test_trials_are_within_the_job_and_the_same_every_time(seed: int, number: int, ranks: int) -> None:
    trial, again = (
        choose_trial(seed, number, ranks=ranks, steps=40, step_seconds=0.1, kinds=KINDS) for _ in range(2)
    )
    assert trial == again
    assert (len(trial.faults), len(trial.strikes)) == {
        **dict.fromkeys(HOST_STRIKES, (0, 1)),
        **dict.fromkeys(MEMBER_STRIKES, (1, 1)),
        "kill": (1, 0),
    }[trial.kind]
    for fault in map(parse_fault, trial.faults):
        told_by = trials_at_etcd.TOLD_BY if trial.strikes else 2
        assert told_by <= fault.step <= 30, "what comes beside it is counted from the first step of all"
        assert fault.rank < ranks
    for strike in trial.strikes:
        assert strike.delay <= 2.0
        assert strike.rank < (HOSTS if isinstance(strike, OfMember) else ranks), "no host that stands by"
        assert not isinstance(strike, Lasting) or 0.2 <= strike.seconds <= trials_at_etcd.MOST_OF_A_STOP


def test_a_strike_says_what_befalls_whom() -> None:
    assert str(STOP) == "host 1 has an agent that stands still for 8 s 100 ms after first_step"
    member = MembersStop(2, "first_step", 0.1, seconds=1.0, two=True)
    assert str(member).startswith("member 2 stands still, with the next one, for 1 s")
    assert str(replace(member, leader=True)).startswith("the leading member stands still")


def test_a_good_run_has_no_reason_against_it() -> None:
    verdict = judge(TRIAL, HEALED, GOOD, "")
    assert (verdict.reason, verdict.note, verdict.step) == ("", "", 5)
    short = replace(HEALED, events=())
    assert judge(TRIAL, short, GOOD, "").note == "nothing came of it, equal bit for bit"
    assert not missed(TRIAL, HEALED)
    assert missed(TRIAL, replace(HEALED, struck=()))


@pytest.mark.parametrize(
    ("run", "said", "reason"),
    [
        (replace(HEALED, status=9), "", "ended with status 9"),
        (replace(HEALED, final={0: FINAL[0], 1: FINAL[1]}), "", "rank 2 did not come to its end"),
        (HEALED, f"step 6\n{LOST}\n{LOST}\n", LOST),
        (replace(HEALED, left_behind=("process 12: python",)), "", "left behind process 12: python"),
        (replace(HEALED, halves=("rank 0 ...",)), "", "two halves went on at once: rank 0 ..."),
    ],
)
def test_a_bad_run_is_told(run: Run, said: str, reason: str) -> None:
    assert judge(TRIAL, run, GOOD, said).reason == reason


def test_what_a_host_that_saw_nobody_feared_is_no_reason() -> None:
    """If it had come true, the end would be another."""
    feared = f"{LOST.rstrip('.')}; {trials_at_etcd.MAYBE_LOST}."
    assert judge(TRIAL, HEALED, GOOD, feared).reason == ""


def test_what_befalls_etcd_alone_costs_the_training_nothing() -> None:
    """A rank was killed beside it: one restart, and the minibatch under way."""
    trial = Trial(1, "member", ("rank=0 step=5 phase=forward kind=kill",), (STOP,))
    assert judge(trial, GOOD, GOOD, "").reason == ""
    assert "minibatches redone" in judge(trial, replace(GOOD, steps=(*STEPS[:6], *STEPS)), GOOD, "").reason
    assert "3 restarts" in judge(trial, HEALED, GOOD, "").reason


@pytest.fixture
def sleeper() -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(["sleep", "600"], text=True) as process:
        yield process
        process.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_who_stands_still_goes_on_when_the_job_is_over(
    tmp_path: Path, sleeper: "subprocess.Popen[str]"
) -> None:
    job = JobOnHosts([], tmp_path, Machines(("a", "b", "c")), own_directories=False)
    job.agents[1] = sleeper
    with STOP.going_on(job):
        os.waitpid(sleeper.pid, os.WUNTRACED)
        assert state(sleeper.pid) == "T"
    assert os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED) is not None
    job.over.set()
    STOP.befall(job)  # at once
    assert sleeper.poll() is None


class Members(EtcdMembers):
    """Of which the last one leads, and which only say what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def leader(self) -> int | None:
        return 2

    def kill(self, host: int) -> None:
        self.asked.append(("kill", host))

    def start(self, host: int) -> None:
        self.asked.append(("start", host))


def test_a_clock_that_no_process_has_is_told(tmp_path: Path, sleeper: "subprocess.Popen[str]") -> None:
    """Else a trial in which no clock was set would pass."""

    class Without(Machines):
        def processes(self, host: int) -> list[int]:
            return [sleeper.pid]

    job = JobOnHosts([], tmp_path, Without(("a", "b", "c")), own_directories=False)
    with pytest.raises(HostsError, match="its clock stays"), ClockJumps(1, "first_step", 0.1).going_on(job):
        pass


@pytest.mark.parametrize(("leader", "host"), [(True, 2), (False, 0)])
def test_a_member_that_was_killed_comes_again(tmp_path: Path, leader: bool, host: int) -> None:
    members = Members()
    job = JobOnHosts([], tmp_path, Machines(("a", "b", "c")), own_directories=False, etcd=members)
    job.over.set()
    MemberDies(0, "first_step", 0.1, leader=leader).befall(job)
    assert members.asked == [("kill", host), ("start", host)]


@pytest.mark.parametrize("said", ["", "step 1 of 9\\n"])
def test_a_host_that_comes_when_the_job_is_over_is_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """It would wait for another one; who takes part in the job and does not end is told of."""
    monkeypatch.setattr(runs_on_hosts, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(runs_on_hosts, "NEVER_CAME_SECONDS", 1.0)

    class Coming(Machines):
        def on(self, host: int) -> list[str]:
            return ["sh", "-c", f'[ {host} = 0 ] && exec echo done; printf "{said}"; exec sleep 600', "sh"]

    job = JobOnHosts([], tmp_path, Coming(("a", "b", "c")), own_directories=False)
    try:
        job.start(0)
        job.agents[0].wait()
        job.start(1)
        if said:
            output = tmp_path / "host-1-0" / OUTPUT
            while not output.exists() or not output.read_text():
                time.sleep(0.01)
            with pytest.raises(TimeoutError, match=r"The agents of hosts \[1\] have not ended"):
                job.wait(60.0)
        else:
            assert job.wait(60.0) == 0
            assert job.wait(60.0) == 0, "asked again"
    finally:
        job.agents[1].kill()
        job.end()


class Dies(HostStrike):
    def befall(self, job: JobOnHosts) -> None:
        raise OSError("it can't be")


def test_what_could_not_be_made_to_happen_is_told(tmp_path: Path) -> None:
    """Else a trial in which nothing happened would pass."""
    job = JobOnHosts([], tmp_path, Machines(("a", "b", "c")), own_directories=False)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "events.jsonl").write_text(
        '{"event": "first_step", "time": 1, "clock": 1, "restart": 0, "rank": 0}\n'
    )
    job.strike(Dies(0, "first_step", 0.0))
    assert [str(trouble) for trouble in job.troubles] == ["it can't be"]


@pytest.mark.parametrize("way", ["in", "out", BOTH])
def test_a_cut_is_mended_although_something_goes_wrong(tmp_path: Path, way: str) -> None:
    done = []

    class Cutting(Machines):
        def _filter(self, host: int, rules: str) -> None:
            done.append((host, rules))

    job = JobOnHosts([], tmp_path, Cutting(("a", "b", "c")), own_directories=False)
    with pytest.raises(ZeroDivisionError), CutOff(1, "first_step", 0.1, way=way).going_on(job):
        raise ZeroDivisionError
    (one, made), (other, undone) = done
    assert (one, other) == (1, 1)
    assert ("iifname cable  drop" in made, "oifname cable  drop" in made) == (way != "out", way != "in")
    assert undone == "delete table inet jitckpt_cut"
