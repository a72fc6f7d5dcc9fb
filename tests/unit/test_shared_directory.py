"""The benchmark that reads a state from other hosts, and from a shared directory, over limited links."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import namespaces

BENCHMARK = [sys.executable, str(Path(__file__).parents[2] / "scripts/bench/shared_directory.py"), "--json"]
MIB, MEGABITS, HOSTS = 16, 100, 3


@pytest.mark.timeout(300)
def test_a_shared_directorys_link_carries_the_state_once_for_each_host() -> None:
    with namespaces(2):
        pass  # else the test is skipped
    small = ["--mib", str(MIB), "--runs", "1", "--megabits", str(MEGABITS), "--only", "3 hosts lose one"]
    done = subprocess.run([*BENCHMARK, *small], capture_output=True, check=True, text=True)
    found = json.loads(done.stdout)
    seconds_of_one = (MIB << 20) * 8 / (MEGABITS * 1e6)
    assert (found["hosts"], found["lost"]) == (HOSTS, 1)
    # A link's queue lets a little through at once.
    assert found["files"] > 0.9 * HOSTS * seconds_of_one
    assert found["memory"] > 0.9 * seconds_of_one  # what the lost host reads
