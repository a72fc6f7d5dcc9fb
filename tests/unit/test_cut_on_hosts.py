"""Agents bring the parts of a cut state to every host, and decode or fetch what a host has lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_assembly import TENSORS, part
from test_parity import lose
from test_protection import Agents

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.cli.inspect import memory_table
from jitckpt.decisions.memory_wanted import tier
from jitckpt.events import EventLog
from jitckpt.reports import memory_inspection
from jitckpt.tiers import host_memory, own_shard

HOSTS = 4
RANKS = (0, 1, 2, 3)


class Replicas(Agents):
    """Each has a rank; all hold the same."""

    def start_with(self, text: str) -> None:
        self.tiers = [MemoryTier(tier(text), self.job, EventLog()) for _ in range(self.count)]
        self.meet()

    def make(self, step: int) -> None:
        for rank, one in enumerate(self.tiers):
            host_memory.put_word(one.memory.of(rank), host_memory.READY, 1)
            one.memory.put(part(rank, step, ranks=RANKS))
        self.until_safe(step)

    def check(self, step: int) -> None:
        """See that each host can go on from this step, bit for bit."""
        for rank, one in enumerate(self.tiers):
            _, state = own_shard.read(one.memory.of(rank), step, one.whole(rank))
            assert state.document == {"rank": rank}
            for name, tensor in TENSORS.items():
                assert torch.equal(state.tensors[name], tensor + (step - 4))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Replicas]:
    found = Replicas(str(tmp_path), HOSTS)
    yield found
    found.close()


def memory_lost(agents: Replicas, host: int) -> None:
    if agents.tiers[host].parity is not None:
        lose(agents, host)
    else:
        agents.tiers[host].memory.close()


@pytest.mark.parametrize(
    ("text", "lost"),
    [("sharded", ()), ("sharded+parity=4", (2,)), ("sharded+peer=2", (0,)), ("sharded+peer=3", (0, 3))],
)
def test_all_hosts_have_all_of_it_again(agents: Replicas, text: str, lost: tuple[int, ...]) -> None:
    agents.start_with(text)
    for step in (4, 5):
        agents.make(step)
    for host in lost:
        memory_lost(agents, host)
    agents.meet()
    agents.gather()
    agents.check(5)


def test_a_host_more_than_the_copies_stand_and_nobody_goes_on(agents: Replicas) -> None:
    agents.start_with("sharded")
    agents.make(4)
    memory_lost(agents, 1)
    agents.meet()
    agents.gather()
    assert [one.whole(rank) for rank, one in enumerate(agents.tiers)] == [None] * HOSTS


def test_a_damaged_part_is_decoded_on_every_host(agents: Replicas) -> None:
    agents.start_with("sharded+parity=4")
    agents.make(4)
    memoryview(agents.tiers[1].memory.shard(1, 4, "first").window)[0] ^= 1
    agents.meet()
    agents.gather()
    agents.check(4)


def test_what_was_put_together_and_others_parts_go_once_a_new_step_is_safe(agents: Replicas) -> None:
    agents.start_with("sharded")
    agents.make(4)
    agents.meet()
    agents.gather()
    agents.check(4)
    assert {one.rank for one in agents.tiers[0].memory.has()} == set(RANKS)
    for protection in agents.protections:
        protection.safe = 0
    agents.make(5)
    assert {one.rank for one in agents.tiers[0].memory.has()} == {0}
    assert agents.tiers[0].whole(0) is None


def test_hosts_that_end_wait_until_all_have_what_they_write(agents: Replicas) -> None:
    agents.start_with("sharded+parity=4")
    agents.make(4)
    memory_lost(agents, 3)
    with ThreadPoolExecutor(HOSTS) as pool:
        every = zip(agents.tiers, agents.hosts, strict=True)
        found = list(pool.map(lambda of: of[0].collect(of[1], 4, ()), every))
    assert found == [(set(), set())] * HOSTS, "no host is lost"
    agents.check(4)


def test_what_is_inspected_tells_a_part_from_the_whole(agents: Replicas) -> None:
    agents.start_with("sharded")
    agents.make(4)
    (found,) = memory_inspection._in(1, agents.tiers[2].memory.of(2), True)
    assert (found.rank, found.step, found.cut_among, found.problem) == (2, 4, RANKS, "")
    assert "2 of 4, 1/4 of it" in str(list(memory_table([found]).columns[1].cells))
