"""Ranks of a job on softgpu together do what one process does."""

import subprocess
import sys

from conftest import PROGRAMS


def test_two_ranks_equal_one_process(softgpu_environment: dict[str, str]) -> None:
    ended = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            str(PROGRAMS / "ranks.py"),
        ],
        env=softgpu_environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
