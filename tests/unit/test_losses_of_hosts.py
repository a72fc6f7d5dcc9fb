"""Which losses of hosts the copies in memory survive: GEMINI, Corollary 1, played by agents without training.

A sample; all by command: JITCKPT_ALL_LOSSES=1 pytest tests/unit/test_losses_of_hosts.py
"""

import os
from collections.abc import Iterator
from itertools import combinations
from math import comb
from pathlib import Path

import pytest
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
