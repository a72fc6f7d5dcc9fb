"""The demo as a user runs it, but shorter; and what the campaign says of runs that went wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from campaign import judge  # noqa: E402
from rehearsal import Digests, Kill, Run, processes_with  # noqa: E402


def test_the_demo_ends_bit_for_bit_equal(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "demo.py"), "--json", "--steps", "16", "--seed", "1"]
    demo = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False, timeout=280
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    outcome = json.loads(demo.stdout)
    assert outcome["bit_for_bit"]
    assert outcome["restored_step"] in range(1, 16)
    assert outcome["minibatches_redone"] in (0, 1)
    assert outcome["left_behind"] == []
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_demo_takes_its_runs_with_it(tmp_path: Path) -> None:
    mark = {"TEST_OF_AN_INTERRUPTED_DEMO": str(tmp_path)}
    command = [sys.executable, str(SCRIPTS / "demo.py"), "--json", "--output", str(tmp_path)]
    events = tmp_path / "undisturbed" / "ckpt" / "events.jsonl"
    with subprocess.Popen(command, env=os.environ | mark, stderr=subprocess.DEVNULL) as demo:
        try:
            while demo.poll() is None and not (events.exists() and '"registered"' in events.read_text()):
                time.sleep(0.05)
            demo.terminate()
            assert demo.wait() == 128 + signal.SIGTERM
        finally:
            demo.kill()
    assert processes_with(f"TEST_OF_AN_INTERRUPTED_DEMO={tmp_path}") == []


def event(name: str, clock: float, restart: int, **details: object) -> dict[str, object]:
    return {"event": name, "time": clock, "clock": clock, "restart": restart, **details}


EVENTS = (
    event("job_started", 0.0, 0),
    event("detected", 5.0, 0, first=True, text="rank 1 was killed by SIGKILL"),
    event("save_ordered", 5.0, 0),
    event("save_ended", 5.1, 0, rank=0, step=7, bytes=1000),
    event("saved", 5.1, 0, step=7),
    event("restart", 5.2, 1),
    event("restored", 8.0, 1, rank=0, step=7),
    event("first_step", 8.5, 1, rank=1, step=8),
)
DIGESTS = {0: Digests("aa", "b0"), 1: Digests("aa", "b1")}
GOOD = Run(0, 12.0, ((1.0, 1),), DIGESTS, EVENTS, ())
MOMENT = Kill(rank=1, step=5, delay=0.02)


def test_a_good_run_has_no_reason_against_it() -> None:
    result = judge(MOMENT, GOOD, GOOD)
    assert (result.reason, result.step, result.redone, result.recovery_seconds) == ("", 7, 1, 3.5)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (replace(GOOD, status=1), "ended with status 1"),
        (replace(GOOD, digests=DIGESTS | {1: Digests("aa", "b2")}), "parameters or buffers differ"),
        (replace(GOOD, events=EVENTS[:1]), "0 restarts, 0 failures detected; None minibatches redone"),
        (
            replace(
                GOOD, events=(*EVENTS[:4], event("save_ended", 5.1, 0, rank=2, step=8, bytes=1), *EVENTS[4:])
            ),
            "2 minibatches redone",
        ),
        (replace(GOOD, left_behind=("process 12: python",)), "left behind process 12: python"),
    ],
)
def test_a_bad_run_is_told(run: Run, reason: str) -> None:
    assert judge(MOMENT, run, GOOD).reason == reason


def test_a_process_that_is_left_behind_is_found() -> None:
    mark = f"JITCKPT_REHEARSAL=test-{os.getpid()}"
    assert processes_with(mark) == []
    name, _, value = mark.partition("=")
    with subprocess.Popen(["sleep", "60"], env=os.environ | {name: value}) as sleeper:
        try:
            assert (sleeper.pid, "sleep") in processes_with(mark)
        finally:
            sleeper.kill()
    assert processes_with(mark) == []
