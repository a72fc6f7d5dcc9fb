"""Runs torch's own launcher on softgpu, with the device proxy and without."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jitckpt.device import LIBRARY_DIR, check_libraries, device_environment

TIMEOUT = 200  # seconds, of one job

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_script() -> Run:
    """Runs a script with `ranks` processes (0: in one, without a launcher) and returns what it wrote."""
    check_libraries("softgpu", LIBRARY_DIR, proxy=True)

    def run(script: Path, *arguments: str, ranks: int, proxy: bool) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= device_environment("softgpu", max(ranks, 1), LIBRARY_DIR, environment, proxy=proxy)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        ended = subprocess.run(
            [sys.executable, *(launcher if ranks else []), str(script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended

    return run
