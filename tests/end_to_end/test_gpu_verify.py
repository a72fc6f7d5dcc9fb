"""The checks meant for a GPU machine, as far as softgpu goes: they run, and they can fail."""

import json
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parents[2] / "scripts" / "gpu" / "checks.py"


def verify(out: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(CHECKS), "--device", "softgpu", *arguments, str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_launches_are_not_lost_and_a_save_allocates_nothing(tmp_path: Path) -> None:
    done = verify(tmp_path, "--only", "device,library,nccl,launches,allocations")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {row["check"]: row for row in json.loads((tmp_path / "results.json").read_text())["results"]}
    before, after = results["launches in a GPT step, before and after the library"]["figure"].split(", ")
    assert int(before) == int(after) > 100
    assert results["allocations on the device in a save"]["figure"].startswith("0, in a save of ")
    assert done.stdout.splitlines()[-1].startswith("└"), "the table is printed last"


def test_a_check_without_time_left_fails(tmp_path: Path) -> None:
    done = verify(tmp_path, "--only", "device", "--seconds-used", "555")
    assert done.returncode == 1
    assert "the time has run out" in done.stdout


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    done = verify(tmp_path, "--only", "sorcery")
    assert done.returncode == 2
    assert "there is no check sorcery" in done.stderr
