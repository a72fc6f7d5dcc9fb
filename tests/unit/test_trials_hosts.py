"""Where hosts are hit, and what is said of runs on hosts that went wrong."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from campaign.runs_on_hosts import HOSTS, HostStrike, JobOnHosts
from campaign.trials_on_hosts import (
    HOST_KINDS,
    STORE_HOST,
    choose_trial,
    has_own_directories,
    judge_on_hosts,
    missed,
)
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.events import FILE_NAME
from jitckpt.faults.injection import parse_fault
from jitckpt.rehearsal.namespaces import Namespaces
from jitckpt.rehearsal.runs import CHECKPOINTS, OUTPUT, Run
from jitckpt.rehearsal.trials import Trial
from jitckpt.saves import final_state
from jitckpt.saves.final_state import FinalState

STRIKE = HostStrike(0, "first_step", 0.1)
TRIAL = Trial(1, STORE_HOST, (), (STRIKE,))
FINAL = {rank: FinalState(9, {"parameters": "aa"}, ()) for rank in range(HOSTS)}
EVENTS = (
    {"event": "detected", "time": 1.0, "clock": 1.0, "restart": 0, "first": True, "text": "host 0 is lost"},
    {"event": "restored", "time": 4.0, "clock": 4.0, "restart": 1, "rank": 0, "step": 5},
    {"event": "first_step", "time": 5.0, "clock": 5.0, "restart": 1, "rank": 0, "step": 6},
)
STEPS = tuple((float(step), step) for step in range(1, 10))
GOOD = Run(0, 9.0, STEPS, FINAL, EVENTS, (STRIKE,), ())


@given(
    st.integers(0, 99), st.integers(0, 999), st.sets(st.sampled_from(HOST_KINDS), min_size=1), st.booleans()
)
def test_trials_are_within_the_job_and_the_same_every_time(
    seed: int, number: int, kinds: set[str], second: bool
) -> None:
    trial, again = (
        choose_trial(seed, number, steps=40, step_seconds=0.1, kinds=sorted(kinds), second=second)
        for _ in range(2)
    )
    assert trial == again
    assert trial.kind in kinds
    assert trial.failures == 1 + second
    hosts = [strike for strike in trial.strikes if isinstance(strike, HostStrike)]
    assert all(0 <= strike.rank < HOSTS for strike in hosts)
    assert len(hosts) == (trial.kind != "kill") + second
    for fault in map(parse_fault, trial.faults):
        assert 2 <= fault.step <= 30
    if trial.kind != "kill":
        assert (hosts[0].rank == 0) == (trial.kind == STORE_HOST)
        assert hosts[0].delay <= 2.0
        assert not second or hosts[1].restart == 1, "two hosts at once may have all that is known of a rank"
    if second and has_own_directories(seed, number):
        assert hosts[-1].event in ("registered", "restored"), "all have fetched what one has saved"


def test_a_strike_says_which_host_dies_when() -> None:
    assert str(HostStrike(2, "restart", 1.5, 1)) == "host 2 dies 1500 ms after restart of restart 1"


def test_a_good_run_has_no_reason_against_it() -> None:
    verdict = judge_on_hosts(TRIAL, GOOD, GOOD, "jitckpt: the state after step 5 is saved.\n")
    assert (verdict.reason, verdict.step, verdict.redone, verdict.recovery_seconds) == ("", 5, 1, 4.0)
    assert not missed(TRIAL, GOOD)
    assert missed(TRIAL, replace(GOOD, struck=()))
    second = replace(TRIAL, strikes=(STRIKE, HostStrike(1, "restart", 4.0, 1)))
    assert not missed(second, GOOD), "the second failure may come too late"
    assert not missed(replace(second, kind="kill"), replace(GOOD, struck=()))


LOST = "jitckpt: rank 2's own state (random numbers, buffers ...) is lost: the host is gone."


@pytest.mark.parametrize(
    ("run", "said", "reason"),
    [
        (replace(GOOD, status=9), "", "ended with status 9"),
        (replace(GOOD, final={0: FINAL[0], 1: FINAL[1]}), "", "rank 2 did not come to its end"),
        (replace(GOOD, steps=(*STEPS[:6], *STEPS[5:])), "", "2 minibatches redone"),
        (replace(GOOD, steps=(*STEPS[:6], *STEPS)), "", "7 minibatches redone"),
        (replace(GOOD, events=EVENTS[:1]), "", "0 restarts, 1 failures detected"),
        (
            replace(GOOD, events=tuple({**one, "restart": 3} for one in EVENTS)),
            "",
            "3 restarts after 1 failures",
        ),
        (GOOD, f"step 6\n{LOST}\n{LOST}\n", LOST),
        (replace(GOOD, left_behind=("process 12: python",)), "", "left behind process 12: python"),
        (replace(GOOD, halves=("rank 0 ...",)), "", "two halves went on at once: rank 0 ..."),
    ],
)
def test_a_bad_run_is_told(run: Run, said: str, reason: str) -> None:
    assert judge_on_hosts(TRIAL, run, GOOD, said).reason == reason


class Machines(Namespaces):
    """Hosts without a network of their own, of which each has the processes that it is told of."""

    running: ClassVar[dict[int, list[int]]] = {}

    def on(self, host: int) -> list[str]:
        return ["env", f"HOST={host}"]

    def processes(self, host: int) -> list[int]:
        return [pid for pid in self.running.get(host, []) if os.path.exists(f"/proc/{pid}/exe")]

    def listening(self, host: int) -> list[str]:
        return ["0100007F:1F90"] if self.running.get(host) and host == 2 else []


class Telling(Machines):
    """Hosts that say where what a rank writes would go, and do nothing else."""

    def on(self, host: int) -> list[str]:
        return ["sh", "-c", 'echo "$JITCKPT_REHEARSAL_DIR"; echo "$@"', "sh"]


@pytest.mark.parametrize("own", [True, False], ids=["a disk of its own", "one disk"])
def test_a_host_writes_to_its_own_disk_or_to_the_one_of_all(tmp_path: Path, own: bool) -> None:
    job = JobOnHosts(["train.py"], tmp_path, Telling(("a", "b", "c")), own_directories=own)
    job.start(1)
    assert job.agents[1].wait() == 0
    job.end()  # kills what still runs
    disk = tmp_path / "disk-1" if own else tmp_path
    ranks, agent = (tmp_path / "host-1-0" / OUTPUT).read_text().splitlines()
    assert ranks == str(disk)
    assert f"--checkpoint-dir {disk / CHECKPOINTS} train.py" in agent
    state = FinalState(8, {}, ())
    final_state.write(disk / final_state.FOLDER, 1, state)
    assert job.final() == {1: state}


@pytest.mark.parametrize("own", [True, False], ids=["a disk of its own", "one disk"])
def test_a_split_is_found_where_the_hosts_have_written(tmp_path: Path, own: bool) -> None:
    job = JobOnHosts([], tmp_path, Machines(("a", "b", "c")), own_directories=own)
    event = {"event": "first_step", "time": 1.0, "clock": 1.0, "restart": 1, "rank": 0}
    places = ["disk-0", "lost-1"] if own else ["."]
    for place in places:
        (tmp_path / place / CHECKPOINTS).mkdir(parents=True)
        line = json.dumps(event) + "\n"
        (tmp_path / place / CHECKPOINTS / FILE_NAME).write_text(line * (2 // len(places)))
    assert job.halves() == ["rank 0 went on 2 times in restart 1 (start 0)"]


def test_a_host_dies_whole_with_its_disk(tmp_path: Path) -> None:
    job = JobOnHosts([], tmp_path, Machines(("a", "b", "c")), own_directories=True)
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    Machines.running = {1: [process.pid for process in processes], 2: [os.getpid()]}
    job.agents[1] = processes[0]  # type: ignore[assignment]
    (tmp_path / "tmp-1").mkdir()
    (tmp_path / "tmp-1" / "torch").touch()
    for host in (0, 1):
        (tmp_path / f"disk-{host}" / CHECKPOINTS).mkdir(parents=True)
        event = f'{{"event": "x", "time": {host}, "clock": {9 - host}, "restart": 0}}\n'
        (tmp_path / f"disk-{host}" / CHECKPOINTS / FILE_NAME).write_text(event)
    job.lose(1)
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "disk-1" / CHECKPOINTS).exists()
    assert [event["clock"] for event in job.events()] == [8, 9], "what it logged is still known, by time"
    (tmp_path / "tmp-0").mkdir()
    (tmp_path / "tmp-0" / "torch").touch()
    assert job.left_behind() == [
        f"process {os.getpid()} on host 2",
        "a socket that listens at 0100007F:1F90 on host 2",
        str(tmp_path / "tmp-0" / "torch"),
    ]
