"""Runs programs of this folder on softgpu, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jitckpt.device import LIBRARY_DIR

PROGRAMS = Path(__file__).parent / "programs"
QUICK = Path(__file__).parents[2] / "scripts" / "campaign_start"  # makes the import of torch quicker

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def softgpu_environment() -> dict[str, str]:
    """The environment in which torch finds two softgpu devices."""
    return os.environ | {
        "LD_PRELOAD": str(LIBRARY_DIR / "libsoftgpu.so"),
        "LD_LIBRARY_PATH": str(LIBRARY_DIR / "driver"),
        "SOFTGPU_DEVICES": "2",
        "OMP_NUM_THREADS": "1",
        # What the tests have stays, so that their programs test the same jitckpt.
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), str(QUICK), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    }


@pytest.fixture(scope="session")
def run_program(softgpu_environment: dict[str, str]) -> Run:
    """Runs `programs/NAME.py ARGUMENTS...` to its end and returns what it wrote.

    Variables of its environment are given by name.
    """

    def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PROGRAMS / f"{name}.py"), *arguments],
            env=softgpu_environment | variables,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def run_whole(run_program: Run) -> Callable[..., str]:
    """The same for a program that must succeed: returns its standard output."""

    def run(name: str, *arguments: str) -> str:
        ended = run_program(name, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


@pytest.fixture(scope="session")
def run_ranks(softgpu_environment: dict[str, str]) -> Callable[[str], None]:
    """Runs a program on two ranks, which must succeed."""

    def run(name: str) -> None:
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run(
            [*launched, str(PROGRAMS / f"{name}.py")],
            env=softgpu_environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    return run
