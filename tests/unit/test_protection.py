"""The agents' part of the memory tier: what is copied where, when a step is safe, and where it comes from."""

import asyncio
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from test_host_memory import made

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.protection import MemoryProtection
from jitckpt.decisions.idle_time import Idle
from jitckpt.decisions.memory_wanted import AUTO, Wanted
from jitckpt.decisions.pace import unpacked
from jitckpt.decisions.traffic import Span
from jitckpt.events import EventLog
from jitckpt.hosts import connections, link, visiting
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.way_in import WayIn
from jitckpt.saves import folders
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, peers, shard
from jitckpt.tiers import idle as idle_profile
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import (
    BEGUN,
    COPY_WAITED,
    OFF,
    READY,
    RULE,
    SAFE,
    SETTLED,
    SKIPPED,
    STEP_TIME,
    HostMemory,
)
from jitckpt.tiers.peers import PeerMemory
from jitckpt.tiers.shard import CHUNK, Index
from jitckpt.wire.agents import OF_MEMORY
from jitckpt.wire.hosts import Host
from jitckpt.wire.visits import HeldShard, VisitDone

LIMIT = 60.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@dataclass
class Agents:
    """So many agents in this process, each with one rank, whose number is its host's."""

    job: str
    count: int
    copies: int = 2
    mode: str = "peer"
    every: int | None = None
    memory_address: str = ""
    domains: tuple[str, ...] = ()
    domains_by: str = ""
    limit: int = 1 << 30
    tiers: list[MemoryTier] = field(default_factory=list)
    hosts: list[Hosts] = field(default_factory=list)
    protections: list[MemoryProtection] = field(default_factory=list)

    def start(self) -> None:
        wanted = Wanted(self.mode, self.copies, self.every, limit=self.limit)
        self.tiers = [MemoryTier(wanted, self.job, EventLog()) for _ in range(self.count)]
        self.meet()

    def meet(self) -> None:
        for one in self.protections:
            one.stop()
        for met in self.hosts:
            met.close()
        listeners = [connections.listen("127.0.0.1") for _ in self.tiers]
        known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
        second: list[socket.socket | None] = [None for _ in self.tiers]
        if self.memory_address:
            second = [connections.listen(self.memory_address) for _ in self.tiers]
        for i, other in enumerate(second):
            port = 0 if other is None else other.getsockname()[1]
            known[i] = replace(known[i], memory_address=self.memory_address, memory_port=port)
        for i, domain in enumerate(self.domains):
            known[i] = replace(known[i], domains=(domain,), domains_by=self.domains_by)
        self.hosts = [
            Hosts(i, known, one, b"secret", 30, memory_listener=other)
            for i, (one, other) in enumerate(zip(listeners, second, strict=True))
        ]
        for tier, met in zip(self.tiers, self.hosts, strict=True):
            tier.answer_others(met)
            met._thread.start()
        for met in self.hosts:
            for connected in met._connected.values():
                assert connected.wait(LIMIT)
        self.protections = [
            MemoryProtection(tier, {rank: tier.given(rank)}, met, EventLog())
            for rank, (tier, met) in enumerate(zip(self.tiers, self.hosts, strict=True))
        ]

    def gather(self) -> None:
        """Have all agents get what their ranks need, at the same time, as they wait for each other."""
        with ThreadPoolExecutor(self.count) as pool:
            for tier in self.tiers:
                tier._gathered = None
            list(pool.map(lambda tier, met: tier.gather(met), self.tiers, self.hosts))

    def put(self, rank: int, step: int, data: bytes = b"state") -> None:
        """Make a snapshot, as the rank does."""
        memory = self.tiers[rank].memory
        host_memory.put_word(memory.of(rank), READY, 1)
        identity = Identity("job", "fingerprint", self.count, rank, rank, self.count)
        memory.put(made(step, data * (rank + 1), identity=identity))

    def look(self) -> bool:
        """Let all agents see what is new, and hear of each other; False, for conditions."""
        for one in self.protections:
            one.look()
        for met, protection in zip(self.hosts, self.protections, strict=True):
            for arrived in met.take():
                if isinstance(arrived, Arrived) and isinstance(arrived.message, OF_MEMORY):
                    protection.hear(arrived.host, arrived.message)
        return False

    def until_safe(self, step: int) -> None:
        until(lambda: self.look() or all(one.safe == step for one in self.protections))

    def word(self, rank: int, which: int) -> int:
        return host_memory.word(self.tiers[rank].memory.of(rank), which)

    def held(self, host: int) -> set[tuple[int, int]]:
        return {(one.rank, one.step) for one in self.tiers[host].memory.has()}

    def flip(self, host: int, rank: int, step: int, *, header: bool = False) -> None:
        """Change a byte of a shard."""
        descriptor = self.tiers[host].memory.of(rank)
        place = host_memory.place(step % 2) if header else host_memory.data_place(step % 2)
        (before,) = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([before ^ 1]), place)

    def close(self) -> None:
        for one in self.protections:
            one.stop()
        for met in self.hosts:
            met.close()
        for tier in self.tiers:
            tier.close(end=True)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(str(tmp_path), 4)
    found.start()
    yield found
    found.close()


def test_a_step_is_safe_once_every_rank_and_its_holders_have_it(agents: Agents) -> None:
    for rank in range(3):
        agents.put(rank, 1)
    until(lambda: agents.look() or agents.held(0) == {(0, 1), (2, 1)})
    assert [one.safe for one in agents.protections] == [0] * 4
    agents.put(3, 1)
    agents.until_safe(1)
    assert [agents.held(host) for host in range(4)] == [
        {(0, 1), (2, 1)},
        {(1, 1), (3, 1)},
        {(0, 1), (2, 1)},
        {(1, 1), (3, 1)},
    ]
    assert [(agents.word(rank, SAFE), agents.word(rank, SETTLED)) for rank in range(4)] == [(1, 1)] * 4
    assert agents.protections[0].step_that_stays([]) == 1
    assert agents.protections[0].step_that_stays([0, 1]) == 1
    assert agents.protections[0].step_that_stays([1, 3]) is None, "both hosts of a pair"


def test_a_host_that_is_lost_in_the_tree_does_not_stop_the_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 3 tells host 2, that host 1, and that host 0; host 1 is lost when it has told what it has."""
    monkeypatch.setattr("jitckpt.decisions.step_tree.FAN_OUT", 1)
    with closing(Agents(str(tmp_path), 4)) as agents:
        agents.start()
        for rank in range(4):
            agents.put(rank, 1)
        agents.until_safe(1)
        for rank in (0, 1, 3):
            agents.put(rank, 2)
        root = agents.protections[0]._counted
        until(lambda: agents.look() or 2 in root._known[1].said.steps)
        until(lambda: agents.look() or 2 in agents.protections[2]._counted._known[3].said.steps)
        agents.protections.pop(1).stop()
        agents.hosts.pop(1).close()
        agents.put(2, 2)
        until(lambda: agents.look() or agents.word(0, SAFE) == agents.word(3, SAFE) == 2)


def test_what_becomes_of_ranks_is_told_once_memory_has_a_step_of_them(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitckpt.agent.protection.say", lambda _: None)
    first, second = agents.protections[:2]
    second._log.leading = False
    for one in (first, second):
        one.have_failed([2], "unhealthy", set())
        assert told(one) == [], "memory has nothing of it yet"
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    for rank in range(4):
        agents.put(rank, 2)
    agents.until_safe(2)
    first.have_failed([3], "unhealthy", set())
    first.have_failed([3], "unhealthy", set())
    begun = [("healthy", [0, 1, 3], 1)]
    assert told(first) == [*begun, ("unhealthy", [2], 1), ("unhealthy", [3], 2)]
    second._log.leading = True  # the first host is lost
    second.have_failed([0], "offline", {0})
    second.have_failed([2], "offline", {0, 2})
    assert told(second) == [*begun, ("unhealthy", [2], 2), ("offline", [0], 2), ("offline", [2], None)]
    first._end("a test wants it")
    first.have_failed([1], "unhealthy", set())
    assert len(told(first)) == 3, "nothing of this start is to be used any more"


def told(one: MemoryProtection) -> list[tuple[str, list[int], int | None]]:
    states = [event for event in one._log.events if event["event"] == "memory_state"]
    return [(event["state"], event["ranks"], event["step"]) for event in states]


@pytest.mark.parametrize("by", ["--failure-domains", "Slurm"])
def test_copies_go_where_no_failure_takes_both(
    tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = by if by == "Slurm" else ""
    agents = Agents(str(tmp_path), 4, domains=("a", "b", "a", "b"), domains_by=scheduler)
    agents.start()
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    for rank in range(4):
        keepers = {host for host in range(4) if (rank, 1) in agents.held(host)}
        assert {agents.domains[host] for host in keepers} == {"a", "b"}
    agents.close()
    assert f"after the ranks were started. Failure domains, by {by}: a, b.\n" in capsys.readouterr().err


def test_a_host_is_visited_for_its_memory_where_it_wants_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(str(tmp_path), 2, memory_address="127.0.0.2")
    agents.start()
    places: list[str] = []
    opened = WayIn.open

    async def noted(self: WayIn, place: tuple[str, int]) -> Any:
        places.append(place[0])
        return await opened(self, place)

    monkeypatch.setattr(WayIn, "open", noted)
    for rank in range(2):
        agents.put(rank, 1)
    agents.until_safe(1)
    assert agents.held(0) == agents.held(1) == {(0, 1), (1, 1)}
    assert set(places) == {"127.0.0.2"}
    agents.close()


def test_how_often_a_snapshot_is_made_is_found_and_all_ranks_change_over_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    told: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)
    monkeypatch.setattr("jitckpt.agent.chosen_method.say", told.append)
    agents = Agents(str(tmp_path), 2, every=AUTO)
    agents.start()
    for step in (1, 5, 9):
        assert agents.word(0, RULE) == agents.word(1, RULE) == 0
        for rank in range(2):
            memory = agents.tiers[rank].memory.of(rank)
            host_memory.put_word(memory, BEGUN, step)
            host_memory.put_word(memory, STEP_TIME, 100)  # microseconds
            host_memory.put_word(memory, READY, 1)
        agents.look()
        for rank in range(2):
            agents.put(rank, step)
        agents.until_safe(step)
    until(lambda: agents.look() or agents.word(1, RULE) != 0)
    every, since = unpacked(agents.word(0, RULE))
    assert unpacked(agents.word(1, RULE)) == (every, since) == agents.protections[1]._pace.rule
    assert every > 1, "a tenth of a millisecond is too little"
    assert since == 9 + 4

    for rank in range(2):  # the network is idle for most of a minibatch
        memory = agents.tiers[rank].memory.of(rank)
        idle_profile.put(memory, 1, Idle(1.0, (Span(0.05, 0.9),)))
    for step in (since, since + every, since + 2 * every):
        for rank in range(2):
            agents.put(rank, step)
        agents.until_safe(step)
        if unpacked(agents.word(0, RULE))[0] == 1:
            break
    assert unpacked(agents.word(0, RULE)) == unpacked(agents.word(1, RULE)) == (1, step + every)
    assert any(
        "a snapshot after each step from now on, since the network is idle for 0.9 s of" in text
        for text in told
    )
    agents.close()


def test_where_the_job_ends_without_a_host_its_holder_writes_what_it_had(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.memory_tier.say", said.append)
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    assert [one.ranks_of([2]) for one in agents.protections] == [({2}, set()), *3 * [(set(), set())]]
    assert agents.protections[0].ranks_of([1, 3]) == (set(), {1, 3}), "both hosts of a pair"
    directory = tmp_path / "ckpt"
    folders.open_directory(directory, "job")
    for host in (0, 1, 3):
        here, nowhere = agents.protections[host].ranks_of([2])
        agents.tiers[host].write_saves(directory, {host} | here, 1, nowhere, f"memory{host}")
    found = folders.find(directory)
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert not any(map(folders.verify, found))
    assert all("the same command goes on from there" in text for text in said)
    agents.tiers[0].write_saves(directory, {0}, 1, {1, 3})
    assert "of ranks 1, 3, whose host is lost, no other has a copy" in said[-1]
    written = [event for event in agents.tiers[0]._log.events if event["event"] == "memory_written"]
    assert len(written) == 1, "what is not whole is not counted as saved"


def test_a_lost_host_is_made_good_from_its_holder(agents: Agents) -> None:
    for step in (1, 2):
        for rank in range(4):
            agents.put(rank, step)
        agents.until_safe(step)
    agents.meet()
    agents.gather()
    assert not any(tier.lacks_copies for tier in agents.tiers)
    agents.tiers[2].memory.close()
    agents.meet()
    agents.gather()
    assert all(tier.lacks_copies for tier in agents.tiers), "what host 2 had kept of rank 0"
    assert agents.held(2) >= {(2, 2)}
    index, state = host_memory.read(agents.tiers[2].memory.of(2), 2)
    assert index.identity.rank == 2
    assert state.tensors["big"].numpy().tobytes() == b"state" * 3


@pytest.mark.parametrize("header", [False, True], ids=["chunk", "header"])
def test_a_flipped_byte_takes_a_source_out_and_it_is_decided_again(agents: Agents, header: bool) -> None:
    for step in (1, 2):
        for rank in range(4):
            agents.put(rank, step)
        agents.until_safe(step)
    agents.flip(0, 0, 2, header=header)
    agents.meet()
    agents.gather()
    assert host_memory.check(agents.tiers[0].memory.of(0), 2).step == 2, "from host 2's memory"
    told = [event for event in agents.tiers[0]._log.events if event["event"] == "memory_sources"]
    assert "rank 0 from the memory of host 2" in told[-1]["reason"]
    agents.flip(0, 0, 2, header=header)
    agents.flip(2, 0, 2, header=header)
    agents.gather()
    told = [event for event in agents.tiers[0]._log.events if event["event"] == "memory_sources"]
    assert told[-1]["step"] == 1, "the older step is whole everywhere"


def test_a_lost_shard_comes_from_all_its_holders_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a holder whose part is damaged nothing more is taken; the others have it as well."""
    with closing(Agents(str(tmp_path), 4, copies=4)) as agents:
        agents.start()
        for rank in range(4):
            agents.put(rank, 1, bytes(3 * CHUNK))
        agents.until_safe(1)
        asked: list[tuple[int, range]] = []
        all_under_way = threading.Barrier(3)
        chunks_into = PeerMemory.chunks_into

        def noted(self: PeerMemory, index: Index, wanted: range, to: Window) -> None:
            asked.append((self._host, wanted))
            all_under_way.wait(LIMIT)
            chunks_into(self, index, wanted, to)

        monkeypatch.setattr(PeerMemory, "chunks_into", noted)
        agents.tiers[0].memory.close()
        agents.meet()
        agents.gather()
        assert {host for host, _ in asked} == {1, 2, 3}
        assert sorted(number for _, part in asked for number in part) == [0, 1, 2, 3]
        assert host_memory.check(agents.tiers[0].memory.of(0), 1).step == 1

        asked.clear()
        all_under_way = threading.Barrier(2)
        agents.tiers[0].memory.forget(0)
        agents.tiers[1].memory.forget(0)
        damaged = agents.tiers[2].memory.of(0)
        for number in range(3):
            os.pwrite(damaged, b"?", host_memory.data_place(1) + number * CHUNK)
        agents.gather()
        assert {host for host, _ in asked} == {2, 3}
        assert host_memory.check(agents.tiers[0].memory.of(0), 1).step == 1
        (*_, told) = [event for event in agents.tiers[0]._log.events if event["event"] == "memory_sources"]
        assert "Step 1 of rank 0 in the memory of host 2 has failed its check" in told["reason"]


def test_a_holder_that_refuses_is_replaced(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)
    for rank in range(4):
        agents.put(rank, 1)
    agents.tiers[2].memory.limit = 0
    agents.until_safe(1)
    assert (0, 1) in agents.held(1)
    assert any("host 1 (127.0.0.1) keeps rank 0's state now" in text for text in said)
    assert agents.protections[3].step_that_stays([0]) == 1
    assert agents.protections[3].step_that_stays([0, 1]) is None


@pytest.mark.parametrize("faster", [True, False])
def test_a_holder_that_is_slow_is_replaced_by_one_that_is_not(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """It lives, and takes what comes: but each copy takes longer than it is from one to the next."""
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)
    takes = peers._take
    slow = {3} if faster else set(range(4))
    of = {agents.tiers[host].memory: host for host in range(4)}

    async def slowly(memory: Any, *given: Any) -> None:
        if of[memory] in slow:
            await asyncio.sleep(0.2)
        await takes(memory, *given)

    monkeypatch.setattr(peers, "_take", slowly)
    for step in range(1, 9):
        for rank in range(4):
            host_memory.put_word(agents.tiers[rank].memory.of(rank), STEP_TIME, 50_000)  # microseconds
            agents.put(rank, step)
        agents.until_safe(step)
    replaced = [text for text in said if "keeps rank 1's state now" in text]
    has = [host for host in (0, 2, 3) if (1, 8) in agents.held(host)]
    slower = [text for text in said if "rank 1's state is protected more slowly: host 3" in text]
    if faster:
        assert has in ([0], [2])
        assert len(replaced) == 1
        assert "has taken longer for each of 3 copies than it is from one to the next: 0.2" in replaced[0]
        assert slower == []
        assert agents.protections[0].step_that_stays([1]) == 8
        assert agents.protections[0].step_that_stays([1, *has]) is None
    else:
        assert has == [3], "the others were no faster"
        assert replaced == []
        assert len(slower) == 1


def test_where_nobody_can_keep_it_the_job_goes_on_and_it_is_said(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)
    for rank in range(4):
        agents.put(rank, 1)
    for tier in agents.tiers[1:]:
        tier.memory.limit = 0
    agents.until_safe(1)
    assert any("rank 0's state is less protected" in text for text in said)
    assert agents.protections[0].step_that_stays([0]) is None, "it is nowhere else"
    assert agents.protections[2].step_that_stays([0]) is None
    assert agents.protections[2].step_that_stays([3]) == 1, "host 0 has it"


def test_to_send_a_state_takes_no_look_at_others(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index may be long, and the agent has one for each rank whose state it keeps."""
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    monkeypatch.setattr(HostMemory, "has", lambda _: pytest.fail("all was looked at"))
    agents.protections[2]._put(0, 2, 1)


def test_what_the_system_refuses_is_said_and_keeps_nobody_waiting(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that may open no more files can't connect, for example."""
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)

    def refused(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(PeerMemory, "give", refused)
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    assert any("rank 0's state is less protected" in text and "Too many open files" in text for text in said)


def test_what_no_sender_foresees_ends_the_protection_and_not_the_training(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)

    def mistaken(*_: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(PeerMemory, "give", mistaken)
    for rank in range(4):
        agents.put(rank, 1)
    until(lambda: agents.look() or all(agents.word(rank, OFF) for rank in range(4)))
    assert any("state can't be sent: KeyError('a mistake')" in text for text in said)


def test_where_the_look_itself_fails_it_is_said_once_and_nobody_waits(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)

    def mistaken() -> None:
        raise KeyError("a mistake")

    one = agents.protections[2]
    monkeypatch.setattr(one, "look", mistaken)
    one.start()
    one.join(LIMIT)
    assert not one.is_alive()
    monkeypatch.undo()
    until(lambda: agents.look() or all(agents.word(rank, OFF) for rank in range(4)))
    assert sum("KeyError('a mistake')" in text for text in said) == 1
    assert one.step_that_stays(()) is None


def test_how_long_a_start_was_unprotected_is_said_and_measured(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)
    first = agents.protections[0]
    first._tell_unprotected()
    assert said == [], "nothing is missing"
    agents.tiers[0].lacks_copies = True
    first._tell_unprotected()
    assert "until a step of this start is safe the state of some ranks is unprotected" in said[0]
    for rank in range(4):
        agents.put(rank, 1)
    first._began -= 100
    host_memory.put_word(agents.tiers[0].memory.of(0), COPY_WAITED, 2_500_000)
    agents.until_safe(1)
    (told,) = [event for event in first._log.events if event["event"] == "memory_safe"]
    assert 100 < told["unprotected"] < 100 + LIMIT
    assert told["copy_waited"] == 2.5
    assert any(re.search(r"protected from step 1 on, 1\d\d\.\d s after the ranks were", one) for one in said)


def test_a_step_that_was_left_out_keeps_nobody_waiting(agents: Agents) -> None:
    host_memory.put_word(agents.tiers[3].memory.of(3), READY, 1)
    host_memory.put_word(agents.tiers[3].memory.of(3), SKIPPED, 5)
    until(lambda: agents.look() or agents.word(0, SETTLED) == 5)
    assert agents.word(0, SAFE) == 0


def test_what_comes_late_is_not_safe_once_others_may_have_given_it_up(agents: Agents) -> None:
    """Ranks that hear of a step that was left out make the next, each keeping what it has heard is safe."""
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    for rank in range(3):
        agents.put(rank, 2)
    host_memory.put_word(agents.tiers[0].memory.of(0), SKIPPED, 3)  # it has waited for rank 3's
    until(lambda: agents.look() or all(agents.word(rank, SETTLED) == 3 for rank in range(4)))
    agents.put(3, 2)
    root = agents.protections[0]
    until(lambda: agents.look() or all(2 in root._counted._known[rank].said.steps for rank in range(4)))
    assert [agents.word(rank, SAFE) for rank in range(4)] == [1] * 4
    for rank in range(4):
        agents.put(rank, 4)
        assert agents.held(rank) >= {(rank, 1), (rank, 4)}
    agents.until_safe(4)


def test_a_rank_that_makes_no_snapshots_any_more_takes_all_out(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        agents.put(rank, 1)
    agents.until_safe(1)
    host_memory.put_word(agents.tiers[2].memory.of(2), OFF, 1)
    until(lambda: agents.look() or all(agents.held(host) == set() for host in range(4)))
    assert agents.protections[1].step_that_stays([]) is None
    assert [agents.word(rank, OFF) for rank in range(4)] == [1] * 4, "nobody makes one, and waits in vain"
    monkeypatch.setattr(Hosts, "send", lambda *said: pytest.fail(f"{said} was said again"))
    agents.look()


def test_nobody_else_has_a_host_keep_something(agents: Agents) -> None:
    one = made(3, b"x", identity=Identity("job", "f", 4, 3, 3, 4))
    with pytest.raises(Exception, match="Rank 3's state is not for this host to keep"):
        PeerMemory(agents.hosts[1], 0).put(one)
    assert agents.held(0) == set()


def test_what_makes_no_sense_is_answered_with_why(agents: Agents) -> None:
    async def nonsense(header: dict[str, Any]) -> str:
        async with agents.hosts[1].visit(0, peers.VISIT) as (reader, writer):
            writer.write(link.encode(header))
            with pytest.raises(visiting.RefusedError) as caught:
                await visiting.answer(reader, "It", 60.0, VisitDone)
            return str(caught.value)

    put: dict[str, Any] = {"type": "put", "rank": 0, "slot": 1}
    get: dict[str, Any] = {"type": "want_shard", "rank": 3, "step": 1}
    for header, why in (
        (put, "A message of type put lacks seal."),
        (put | {"seal": 7}, "seal can't be 7."),
        (put | {"seal": "no hex"}, "without its seal"),
        (put | {"seal": "00" * shard.SEAL_BYTES}, "damaged seal"),
        ({"shout": True}, "has the unknown type None"),
        ({"type": "want_parities"}, "Nobody knows what WantParities() asks for."),
        (get | {"timeline": ""}, "has nothing of rank 3"),
        (get | {"timeline": None}, "timeline can't be None."),
    ):
        assert why in asyncio.run(nonsense(header))


@pytest.mark.parametrize(
    "header",
    [
        {"held": True},
        {"type": "shards", "there": None},
        {"type": "shards", "there": [{"rank": 0}]},
        {"type": "shards", "there": [dict.fromkeys(HeldShard.__annotations__, 0)]},
    ],
)
def test_an_answer_that_makes_no_sense_is_refused_in_a_sentence(
    agents: Agents, header: dict[str, Any]
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await link.receive(reader)
        writer.write(link.encode(header))

    agents.hosts[0].answers[peers.VISIT] = answer
    with pytest.raises(LinkError, match=r"^host 0 .* says what makes no sense: (A|In a) message .*\.$"):
        PeerMemory(agents.hosts[1], 0).has()


def test_a_keeper_that_is_killed_is_replaced(tmp_path: Path) -> None:
    tier = MemoryTier(Wanted("peer", keep=LIMIT), str(tmp_path), EventLog())
    alone = Agents(str(tmp_path), 2, tiers=[tier, tier])
    for rank in (0, 1):
        tier.given(rank)
        alone.put(rank, 4)
    assert tier._keeper._process is not None
    tier._keeper._process.kill()
    tier._keeper._process.wait()
    tier.see_keeper()
    tier.close(end=False)
    second = MemoryTier(Wanted("peer", keep=LIMIT), str(tmp_path), EventLog())
    assert [(one.rank, one.step) for one in second.memory.has()] == [(0, 4), (1, 4)]
    second.close(end=True)


def test_all_memory_is_found_again_by_the_next_agent(tmp_path: Path) -> None:
    first = Agents(str(tmp_path), 1)
    first.tiers = [MemoryTier(Wanted("peer", keep=LIMIT), first.job, EventLog())]
    first.count = 1
    first.tiers[0].given(0)
    first.put(0, 4)
    first.tiers[0].close(end=False)  # as if it was killed
    second = MemoryTier(Wanted("peer", keep=LIMIT), first.job, EventLog())
    assert [(one.rank, one.step) for one in second.memory.has()] == [(0, 4)]
    busy = MemoryTier(Wanted("peer", keep=LIMIT), first.job, EventLog())
    assert busy.memory.has() == [], "the keeper has an agent already"
    second.close(end=True)
    busy.close(end=True)


def test_that_no_rank_has_called_init_is_said_once_by_the_first_host(
    agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = agents.protections
    first._tell_uncalled()
    for one in others:
        one.hear_rank(0)
    for one in agents.protections:
        one.stop()
    said = capsys.readouterr().err
    assert (
        said.count(
            "no rank has come through jitckpt.init yet: without that --memory-tier keeps nothing in memory"
        )
        == 1
    )
