"""Copies that no host has room for as a whole go in parts to several (COLLAB)."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_host_memory import made
from test_protection import Agents, until

from jitckpt.agent.memory_tier import MemoryTier, ToCutAnew
from jitckpt.agent.protection import MemoryProtection
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.encoding import tensor_file
from jitckpt.events import EventLog
from jitckpt.formats import whole_step
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import TENSORS_FILE, Identity
from jitckpt.tiers import host_memory, shard
from jitckpt.tiers.host_memory import READY
from jitckpt.tiers.part_peers import PeerParts

HOSTS = 4
DATA = b"state" * (29 * shard.CHUNK // 50)  # three chunks
SMALL = b"small"
PLENTY = 1 << 30


@dataclass
class UnequalAgents(Agents):
    """The rank of host 0 has a larger state than all others, and no other host has room for a copy of it."""

    directory: Path | None = None

    def start(self) -> None:
        wanted = Wanted("peer", 2, limit=PLENTY, directory=str(self.directory or ""))
        self.tiers = [MemoryTier(wanted, f"{self.job} {host}", EventLog()) for host in range(self.count)]
        for tier in self.tiers[1:]:
            tier.memory.limit = 5 * shard.CHUNK  # for two steps of two chunks, and more
        self.meet()

    def put(self, rank: int, step: int, data: bytes = b"") -> None:
        memory = self.tiers[rank].memory
        host_memory.put_word(memory.of(rank), READY, 1)
        identity = Identity("job", "fingerprint", self.count, rank, rank, self.count)
        limit, memory.limit = memory.limit, None  # a rank writes its own
        memory.put(made(step, data or (SMALL if rank else DATA), identity=identity))
        memory.limit = limit

    def parts(self, host: int) -> list[tuple[int, int, int]]:
        return [(one.rank, one.step, one.count) for of in self.tiers[host].spare.has() for one in of]

    def make(self, step: int) -> None:
        for rank in range(self.count):
            self.put(rank, step)
        self.until_safe(step)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module in ("protection", "spreading", "memory_tier"):
        monkeypatch.setattr(f"jitckpt.agent.{module}.say", found.append)
    return found


@pytest.fixture
def agents(tmp_path: Path, said: list[str]) -> Iterator[UnequalAgents]:
    found = UnequalAgents(str(tmp_path), HOSTS)
    found.start()
    yield found
    found.close()


def lose(agents: UnequalAgents, host: int) -> None:
    """Another host comes in the place of one, with nothing in its memory."""
    old = agents.tiers[host]
    wanted, agents.job = old.wanted, agents.job + "'"
    old.close(end=True)
    agents.tiers[host] = MemoryTier(wanted, f"{agents.job} {host}", EventLog())
    agents.meet()
    agents.gather()


def test_what_is_in_parts_is_written_to_files_where_fewer_hosts_meet(
    agents: UnequalAgents, tmp_path: Path
) -> None:
    agents.make(1)
    files = ToCutAnew(tmp_path / "files", "job")
    folders.open_directory(files.directory, "job")
    agents.tiers.pop(0).close(end=True)
    agents.meet()
    with ThreadPoolExecutor(HOSTS) as pool:
        every = zip(agents.tiers, agents.hosts, strict=True)
        assert list(pool.map(lambda of: of[0].gather(of[1], files), every)) == [1] * (HOSTS - 1)
    saved = [folders.read(one).tensors["big"].numpy().tobytes() for one in whole_step.find(files.directory)]
    assert saved == [DATA, *[SMALL] * (HOSTS - 1)]


def test_a_lost_hosts_state_is_put_together_of_parts_bit_for_bit(
    agents: UnequalAgents, said: list[str]
) -> None:
    agents.make(1)
    holders = [host for host in range(1, HOSTS) if agents.parts(host)]
    assert sum(count for host in holders for *_, count in agents.parts(host)) == 3
    assert len(holders) > 1
    sentence = next(text for text in said if "goes in parts" in text)  # again, once it is known how fast
    assert "no host has room for the whole state of rank 0" in sentence
    first = agents.protections[0]
    assert first.step_that_stays([0]) == 1
    assert first.step_that_stays([0, holders[0]]) is None, "all parts are needed"
    assert not any("less protected" in text for text in said)
    lose(agents, 0)
    there = agents.tiers[0].memory.shard(0, 1, "first")
    assert bytes(memoryview(there.window))[: len(DATA)] == DATA
    host_memory.check(agents.tiers[0].memory.of(0), 1)
    assert any(
        "rank 0 from parts on several hosts" in event["reason"]
        for event in agents.tiers[1]._log.events
        if event["event"] == "memory_sources"
    )


def test_two_steps_of_parts_are_kept_and_older_ones_given_up(agents: UnequalAgents) -> None:
    for step in (1, 2, 3, 4):
        agents.make(step)
    steps = {step for host in range(1, HOSTS) for _, step, _ in agents.parts(host)}
    assert steps == {3, 4}


def test_a_damaged_part_is_passed_over_and_the_job_goes_back_a_step(agents: UnequalAgents) -> None:
    agents.make(1)
    agents.make(2)
    host = next(host for host in range(1, HOSTS) if agents.parts(host))
    (descriptor,) = agents.tiers[host].spare.descriptors.values()
    (before,) = os.pread(descriptor, 1, host_memory.data_place(0))
    os.pwrite(descriptor, bytes([before ^ 1]), host_memory.data_place(0))
    lose(agents, 0)
    assert agents.held(0) == {(0, 1)}
    reason = [one["reason"] for one in agents.tiers[0]._log.events if one["event"] == "memory_sources"][-1]
    assert f"in the memory of host {host} has failed its check" in reason


def test_memory_that_is_lent_is_given_back_when_its_host_needs_it(
    agents: UnequalAgents, said: list[str]
) -> None:
    agents.make(1)
    host = next(host for host in range(1, HOSTS) if agents.parts(host))
    for slot in host_memory.SLOTS:  # as its rank does, when its state has grown
        host_memory.reserve(agents.tiers[host].memory.of(host), slot, len(DATA))
    agents.tiers[host].spare.see_limit()
    assert agents.parts(host) == []
    until(lambda: agents.look() or agents.protections[0].step_that_stays([0]) is None)
    assert agents.protections[0].step_that_stays([host]) == 1
    agents.make(2)
    assert agents.protections[0].step_that_stays([0]) == 2
    others = [other for other in range(1, HOSTS) if other != host]
    assert sum(count for other in others for _, step, count in agents.parts(other) if step == 2) == 3
    assert not agents.parts(host)


def test_what_no_memory_has_room_for_goes_to_directories(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    agents = UnequalAgents(str(tmp_path), HOSTS, directory=folder)
    agents.start()
    for tier in agents.tiers[1:]:
        tier.memory.limit = 1 << 20
    agents.make(1)
    assert any("to directories of" in text for text in said)
    assert not any(folder.iterdir())
    assert agents.protections[0].step_that_stays([0]) == 1
    lose(agents, 0)
    assert agents.held(0) == {(0, 1)}
    host_memory.check(agents.tiers[0].memory.of(0), 1)
    agents.close()


def test_where_there_is_no_room_at_all_it_is_said_and_keeps_nobody_waiting(
    agents: UnequalAgents, said: list[str]
) -> None:
    for tier in agents.tiers[1:]:
        tier.memory.limit = 1 << 20
    agents.make(1)
    assert any("for a copy of the state of rank 0 there is no room in all hosts" in text for text in said)
    assert any("rank 0's state is less protected, in its own host's memory alone" in text for text in said)
    assert agents.protections[0].step_that_stays([0]) is None


def test_parts_are_held_by_the_keeper_for_the_next_agent(agents: UnequalAgents) -> None:
    agents.make(1)
    host = next(host for host in range(1, HOSTS) if agents.parts(host))
    before = agents.parts(host)
    old = agents.tiers[host]
    old.close(end=False)
    agents.tiers[host] = MemoryTier(old.wanted, old._job, EventLog())
    assert agents.parts(host) == before


def test_a_part_that_can_not_be_sent_costs_that_step_its_copy_alone(
    agents: UnequalAgents, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.make(1)

    def fails(*_: object, **__: object) -> None:
        raise LinkError("The line is dead.")

    with monkeypatch.context() as broken:
        broken.setattr(PeerParts, "put_part", fails)
        agents.make(2)
    assert agents.protections[0].step_that_stays([0]) is None
    agents.make(3)
    assert agents.protections[0].step_that_stays([0]) == 3


def end_without_the_first_host(agents: UnequalAgents, step: int, directory: Path) -> list[SaveRecord]:
    """The job ends since nobody comes in its place; return what the others have written."""
    agents.protections.pop(0).stop()
    agents.hosts.pop(0).close()
    until(lambda: agents.look() or all(0 in met.lost for met in agents.hosts))
    folders.open_directory(directory, "job")

    def end(met: Hosts, protection: MemoryProtection, tier: MemoryTier) -> None:
        here, nowhere = protection.ranks_of([0])
        assert (here, nowhere) == (set(), {0}), "no host has it as a whole"
        nobody = tier.write_parts(met, step, nowhere, directory)
        tier.write_saves(directory, {met.index} | here, step, nobody, f"memory{met.index}")

    with ThreadPoolExecutor(HOSTS) as pool:
        list(pool.map(end, agents.hosts, agents.protections, agents.tiers[1:]))
    found = folders.find(directory)
    assert not any(map(folders.verify, found))
    return found


def test_where_the_job_ends_without_a_host_what_is_in_parts_is_written_as_a_save(
    agents: UnequalAgents, tmp_path: Path, said: list[str]
) -> None:
    agents.make(1)
    found = end_without_the_first_host(agents, 1, tmp_path / "ckpt")
    assert [one.rank for one in found] == [0, 1, 2, 3]
    of_lost = tensor_file.read(found[0].path / TENSORS_FILE)
    assert of_lost["big"].numpy().tobytes() == DATA
    assert sum("the state of rank 0 after step 1, which was in parts" in text for text in said) == 1
    assert sum("the same command goes on from there" in text for text in said) == 3


def test_where_a_part_is_damaged_as_the_job_ends_one_host_says_that_nobody_has_it(
    agents: UnequalAgents, tmp_path: Path, said: list[str]
) -> None:
    agents.make(1)
    host = next(host for host in range(1, HOSTS) if agents.parts(host))
    (descriptor,) = agents.tiers[host].spare.descriptors.values()
    (slot,) = (slot for slot, _ in host_memory.found(descriptor))
    place = host_memory.data_place(slot)
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 1]), place)
    found = end_without_the_first_host(agents, 1, tmp_path / "ckpt")
    assert [one.rank for one in found] == [1, 2, 3]
    assert sum("of rank 0, whose host is lost, no other has a copy" in text for text in said) == 1
    assert any("a part of rank 0's state is passed over" in text for text in said)
