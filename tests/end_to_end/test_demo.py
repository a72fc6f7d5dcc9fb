"""The demo and the campaign as a user runs them, but shorter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jitckpt.rehearsal.runs import processes_with

SCRIPTS = Path(__file__).parents[2] / "scripts"


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


def test_a_campaign_of_one_trial(tmp_path: Path) -> None:
    program = str(SCRIPTS / "fault_campaign.py")
    command = [sys.executable, program, "--trials", "1", "--steps", "8", "--ranks", "2"]
    options = [
        str(SCRIPTS.parent / "examples" / "train_gpt.py"),
        "--kinds",
        "kill",
        "--second",
        "1",
        "--json",
    ]
    campaign = subprocess.run(
        [*command, *options, "--", "--layers", "1", "--width", "32", "--length", "16"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    outcome = json.loads(campaign.stdout)
    assert outcome["passed"]
    assert outcome["results"]["1"]["failure"].startswith("rank=")
    assert list(tmp_path.iterdir()) == []
