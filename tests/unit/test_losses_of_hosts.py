"""Which losses of hosts the copies in memory survive: GEMINI, Corollary 1, played by agents without training.

A sample; all by command: JITCKPT_ALL_LOSSES=1 pytest tests/unit/test_losses_of_hosts.py
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from math import comb
from pathlib import Path

import pytest
from bench.memory_losses import drawn
from test_protection import Agents

from jitckpt.tiers import host_memory

HOSTS, COPIES = 8, 2
ALL = bool(os.environ.get("JITCKPT_ALL_LOSSES"))
EVERY = 1 if ALL else 9
STEP = 2


def chance(lost: int) -> float:
    """Return the part of all ways to lose so many hosts that leaves a copy of each shard: Corollary 1.

    Of fewer hosts than two groups have at most one group is lost as a whole, so the bound is exact.
    """
    groups = HOSTS // COPIES
    return 1 - groups * comb(HOSTS - COPIES, lost - COPIES) / comb(HOSTS, lost)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(str(tmp_path), HOSTS, copies=COPIES)
    found.start()
    yield found
    found.close()


def comes_back(agents: Agents, lost: tuple[int, ...]) -> bool:
    """Lose what these hosts have in memory, have others in their places, and see what all then have."""
    foreseen = agents.protections[0].step_that_stays(lost)
    for host in lost:
        agents.tiers[host].memory.close()
    agents.meet()
    agents.gather()
    whole = all((rank, STEP) in agents.held(rank) for rank in range(HOSTS))
    assert whole == (foreseen == STEP), "what is said to stay is what comes back"
    for rank in range(HOSTS if whole else 0):
        host_memory.check(agents.tiers[rank].memory.of(rank), STEP)
    return whole


@pytest.mark.parametrize("count", [2, 3])
def test_as_often_as_the_corollary_says(agents: Agents, count: int) -> None:
    ways = [*combinations(range(HOSTS), count)][::EVERY]
    survived = 0
    for lost in ways:
        for rank in range(HOSTS):
            agents.put(rank, STEP)
        agents.until_safe(STEP)
        survived += comes_back(agents, lost)
    pairs = {frozenset(of) for of in agents.protections[0]._placed}
    assert len(pairs) == HOSTS // COPIES
    assert survived == sum(not any(pair <= set(lost) for pair in pairs) for lost in ways)
    if ALL:
        assert survived / len(ways) == pytest.approx(chance(count))


BENCHMARK = [sys.executable, str(Path(__file__).parents[2] / "scripts/bench/memory_losses.py"), "--json"]
FEW = [*BENCHMARK, "--hosts", "4", "--lost", "2"]


def test_agents_that_are_killed_bring_back_what_others_keep() -> None:
    """A few trials of the benchmark. Hosts 0 and 2 have each other's state, and so have 1 and 3."""
    done = subprocess.run([*FEW, "--trials", "3", "--seed", "2"], capture_output=True, check=True, text=True)
    found = json.loads(done.stdout)
    lost = drawn(2, 4, 2, 3)
    pairs = [0, 2], [1, 3]
    assert {one in pairs for one in map(list, lost)} == {True, False}
    assert found["came_back"] == sum(one not in pairs for one in lost)
    assert found["corollary_1"] == pytest.approx(2 / 3, abs=1e-4)


def processes_with(mark: str) -> int:
    """Return how many processes have this in their environment, and still run."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_dead = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            count += not is_dead and mark.encode() in (path / "environ").read_bytes()
        except OSError:
            continue
    return count


def test_no_agent_outlives_a_benchmark_that_is_killed() -> None:
    mark = f"TEST_MARK={os.getpid()}"
    environment = {**os.environ, "TEST_MARK": str(os.getpid())}
    with subprocess.Popen([*FEW, "--trials", "1000"], env=environment, stdout=subprocess.DEVNULL) as running:
        while processes_with(mark) < 9:  # itself, four agents and their keepers
            assert running.poll() is None
            time.sleep(0.05)
        running.kill()
    while processes_with(mark):
        time.sleep(0.05)
