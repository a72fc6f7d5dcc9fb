"""Jobs of unchanged programs, and what they end with."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Program

MAIN = "import sys; from jitckpt.cli import main; sys.exit(main())"
LIMIT = 700.0  # seconds: to find what hangs, however slow the machine

Ends = dict[str, Any]


def run(program: Program, ranks: int, folder: Path, *flags: str, **environment: str) -> tuple[Ends, str]:
    """Run a program on ranks of softgpu; return what each says of its end and its losses, and all printed."""
    (folder / "out").mkdir(parents=True)
    command = [sys.executable, "-c", MAIN, "run", "--standalone", "--nproc-per-node", str(ranks)]
    # It may be slow on its way to the first step; who waits for it must not take that for a hang.
    command += ["--device", "softgpu", "--hang-timeout", "60", *flags, str(program.path), "out"]
    variables = {"SOFTGPU_DEVICES": str(ranks), "HF_HUB_OFFLINE": "1", **program.environment, **environment}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            said, _ = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            said, _ = job.communicate(timeout=60)
            pytest.fail(f"the job did not end in {LIMIT:.0f} s:\n{said[-6000:]}")
        finally:
            if job.poll() is None:  # the tests are interrupted
                os.killpg(job.pid, signal.SIGTERM)
    assert job.returncode == 0, said[-6000:]
    ends = {file.name: json.loads(file.read_text()) for file in (folder / "out").glob("end-*.json")}
    assert len(ends) == ranks
    return ends | {file.name: losses(file) for file in (folder / "out").glob("loss-*.jsonl")}, said


def until(condition: Callable[[], bool], goes_on: Callable[[], bool], said: Callable[[], str]) -> None:
    """Wait for a condition, while a job goes on. said: what it says."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert goes_on(), said()[-6000:]
        assert time.monotonic() < end, said()[-6000:]
        time.sleep(0.05)


def losses(file: Path) -> dict[str, float]:
    """Return the losses by steps; one that was computed again after a failure has to be what it was."""
    found: dict[str, float] = {}
    for step, loss in map(json.loads, file.read_text().splitlines()):
        assert found.setdefault(str(step), loss) == loss, f"{file.name}, step {step}"
    return found


def skip_unless_installed(program: Program) -> None:
    """Skip the test where the program's packages are not all there."""
    for package in program.needs:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: scripts/test --frameworks makes an environment with it")
