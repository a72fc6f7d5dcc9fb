"""How the agents of a job come to one method with `--memory-tier auto`, and leave it again."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from test_host_memory import made
from test_protection import Agents, until

from jitckpt.agent.chosen_method import FIRST, LOOKED_AT
from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.pacer import Pacer
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.decisions.pace import unpacked
from jitckpt.events import Event, EventLog
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import (
    BEGUN,
    COUNT_GRADIENTS,
    GRADIENTS,
    NO_GRADIENTS,
    READY,
    RULE,
    SEND_GRADIENTS,
    SKIPPED,
    STEP_BYTES,
    STEP_TIME,
    WAITED,
)
from jitckpt.tiers.shard import CHUNK
from jitckpt.wire import agents as wire

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for room in ("chosen_method", "protection", "memory_tier", "fetching", "spreading"):
        monkeypatch.setattr(f"jitckpt.agent.{room}.say", found.append)
    return found


def put(agents: Agents, step: int, chunks: int = 2) -> None:
    """Every rank makes a snapshot of so many chunks."""
    for rank in range(agents.count):
        host_memory.put_word(agents.tiers[rank].memory.of(rank), READY, 1)
        data = bytes([rank + 1, step]) * (chunks * CHUNK // 2 - 64)
        identity = Identity("job", "fingerprint", agents.count, rank, rank, agents.count)
        agents.tiers[rank].memory.put(made(step, data, identity=identity))


def told(agents: Agents, name: str) -> list[Event]:
    return [event for event in agents.protections[0]._log.events if event["event"] == name]


def test_nothing_is_sent_before_all_hosts_have_told_what_they_have(tmp_path: Path, said: list[str]) -> None:
    with closing(Agents(str(tmp_path), 3, mode="auto")) as agents:
        agents.start()
        for rank in range(2):
            agents.put(rank, 1)
        for _ in range(20):
            agents.look()
        assert [agents.held(host) for host in range(3)] == [{(0, 1)}, {(1, 1)}, set()]
        agents.put(2, 1)
        agents.until_safe(1)
        assert sum(len(agents.held(host)) for host in range(3)) == 6
        assert [one["method"] for one in told(agents, "memory_method")] == ["peer"]
        assert not any("(--memory-tier auto)" in text for text in said), "nothing speaks against copies"


def test_parity_is_kept_where_copies_have_no_room_and_brings_a_lost_host_back(
    tmp_path: Path, said: list[str]
) -> None:
    """Two steps of two states are 32 MiB, of a state and of its half 24."""
    with closing(Agents(str(tmp_path), 3, mode="auto", limit=28 * MEBIBYTE)) as agents:
        agents.start()
        for step in (1, 2):
            put(agents, step)
            agents.until_safe(step)
        assert [agents.held(host) for host in range(3)] == [{(host, 1), (host, 2)} for host in range(3)]
        (method,) = told(agents, "memory_method")
        assert method["method"] == "parity"
        assert "host 0 would need 33.6 MiB of memory, and may take 28 MiB" in method["text"]
        assert f"memory tier: {method['text']} (--memory-tier auto)." in said
        assert any("with parity over 3 hosts, of which one may be lost" in text for text in said)
        assert not any("less protected" in text for text in said)
        assert agents.protections[0].step_that_stays([2]) == 2
        assert agents.protections[0].step_that_stays([1, 2]) is None

        agents.tiers[2].close(end=True)
        agents.tiers[2] = type(agents.tiers[2])(agents.tiers[0].wanted, f"{tmp_path}-2", agents.tiers[2]._log)
        agents.meet()
        agents.gather()
        index = host_memory.check(agents.tiers[2].memory.of(2), 2)
        assert index.identity.rank == 2
        assert all(tier.lacks_copies for tier in agents.tiers), "the parity that host 2 had"
        put(agents, 3)
        agents.until_safe(3)
        agents.meet()
        agents.gather()
        assert not any(tier.lacks_copies for tier in agents.tiers)


def test_where_copies_have_room_again_parity_gives_its_memory_back(tmp_path: Path) -> None:
    with closing(Agents(str(tmp_path), 3, mode="auto", limit=28 * MEBIBYTE)) as agents:
        agents.start()
        put(agents, 1)
        agents.until_safe(1)
        parity = agents.tiers[0].parity
        assert parity is not None
        assert parity.parities.taken() > 0
        agents.meet()
        put(agents, 2, chunks=1)  # a smaller state
        for rank in range(3):
            agents.tiers[rank].memory.drop(rank, 1)
        agents.until_safe(2)
        assert agents.tiers[0].parity is None
        assert parity.parities.taken() == 0
        assert sum((rank, 2) in agents.held(host) for rank in range(3) for host in range(3)) == 6


@pytest.fixture
def on_a_slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """Two agents whose snapshots take more than two steps, until they have found that out."""
    measured = Pacer.measured
    monkeypatch.setattr(Pacer, "measured", lambda self, step, *_: measured(self, step, 0.9, 0.4))
    agents = Agents(str(tmp_path), 2, mode="auto")
    agents.start()
    for step in (1, 5, 9):
        for rank in range(2):
            memory = agents.tiers[rank].memory.of(rank)
            if step == 1:
                assert host_memory.word(memory, GRADIENTS) == COUNT_GRADIENTS
            host_memory.put_word(memory, BEGUN, step)
            host_memory.put_word(memory, STEP_TIME, 400_000)  # microseconds
            if step == 5:
                host_memory.put_word(memory, STEP_BYTES, 2 * MEBIBYTE)
        agents.look()
        put(agents, step)
        agents.until_safe(step)
    until(lambda: agents.look() or all(agents.word(rank, RULE) != 0 for rank in range(2)))
    yield agents
    agents.close()


def rules(agents: Agents) -> list[tuple[int, int]]:
    return [unpacked(agents.word(rank, RULE)) for rank in range(2)]


def gradients(agents: Agents) -> list[int]:
    return [agents.word(rank, GRADIENTS) for rank in range(2)]


def test_gradients_are_chosen_where_states_are_too_large_for_each_step(
    on_a_slow_link: Agents, said: list[str]
) -> None:
    agents = on_a_slow_link
    assert rules(agents) == [(1, 13), (1, 13)]
    assert gradients(agents) == [SEND_GRADIENTS] * 2
    method = told(agents, "memory_method")[-1]
    assert method["method"] == "peer+optimizer"
    assert "they have 25% of the bytes of whole states, which take 0.9 s" in method["text"]
    assert f"memory tier: {method['text']} (--memory-tier auto)." in said


def is_as_without(agents: Agents, settled: int, why: str, said: list[str]) -> None:
    until(lambda: agents.look() or rules(agents) == [(3, settled + 1)] * 2)
    assert gradients(agents) == [NO_GRADIENTS] * 2
    method = told(agents, "memory_method")[-1]
    assert method["method"] == "peer"
    assert f"whole states from now on, after every 3 steps, since {why}" in method["text"]
    assert f"memory tier: {method['text']} (--memory-tier auto)." in said


def test_where_a_rank_takes_no_gradients_any_more_all_send_whole_states(
    on_a_slow_link: Agents, said: list[str]
) -> None:
    memory = on_a_slow_link.tiers[1].memory.of(1)
    host_memory.put_word(memory, GRADIENTS, NO_GRADIENTS)
    why = "rank 1's optimizer steps are not made again on another host"
    is_as_without(on_a_slow_link, 10, why, said)


def test_where_a_snapshot_comes_too_late_all_send_whole_states(
    on_a_slow_link: Agents, said: list[str]
) -> None:
    host_memory.put_word(on_a_slow_link.tiers[0].memory.of(0), SKIPPED, 14)
    is_as_without(on_a_slow_link, 14, "a snapshot was not whole everywhere in time", said)


@pytest.mark.parametrize("waited", [0.001, 0.02])
def test_where_the_training_waits_in_each_step_all_send_whole_states(
    on_a_slow_link: Agents, said: list[str], waited: float
) -> None:
    """The first ones, which are whole, are waited for in any case."""
    agents, memory = on_a_slow_link, on_a_slow_link.tiers[1].memory.of(1)
    steps = range(13, 13 + FIRST + LOOKED_AT)
    for step in steps:
        more = 1.0 if step == 13 else waited
        host_memory.put_word(memory, WAITED, host_memory.word(memory, WAITED) + int(more * 1e6))
        put(agents, step, chunks=1)
        agents.until_safe(step)
        for _ in range(3):
            agents.look()
        if step != steps[-1]:
            assert gradients(agents) == [SEND_GRADIENTS] * 2
    if waited > 0.01:
        is_as_without(agents, steps[-1] + 1, "the training waits 0.02 s a step for gradients", said)
    else:
        assert gradients(agents) == [SEND_GRADIENTS] * 2


@pytest.mark.parametrize("first", ["auto", "peer"])
def test_where_hosts_were_started_with_several_options_copies_are_kept(
    tmp_path: Path, first: str, said: list[str]
) -> None:
    """A host that does not choose tells nothing: no training waits for that more than once."""
    with closing(Agents(str(tmp_path), 2, mode="auto")) as agents:
        agents.start()
        other = MemoryTier(Wanted("peer", limit=1 << 30), f"{tmp_path}-2", EventLog())
        number = 1 if first == "auto" else 0
        agents.tiers[number].close(end=True)
        agents.tiers[number] = other
        agents.meet()
        put(agents, 1, chunks=1)
        if first == "auto":
            until(lambda: agents.look() or agents.held(0) == {(0, 1), (1, 1)})
            assert agents.held(1) == {(1, 1)}, "it may still tell"
            host_memory.put_word(agents.tiers[0].memory.of(0), SKIPPED, 5)
            agents.look()
        put(agents, 6, chunks=1)
        agents.until_safe(6)
        assert all({(0, 6), (1, 6)} <= agents.held(host) for host in range(2))
    assert any("not all hosts tell what they have" in text for text in said) == (first == "auto")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (wire.States([1, 2], [], [1], [], 0), "it tells of some ranks in part"),
        (wire.States([1], [1], [1], [], 0), "it tells of some ranks in part"),
        (wire.States([1], [], [0], [], 0), "a rank has nothing"),
        (wire.States([], [], [], [], 0), "a rank has nothing"),
    ],
)
def test_nonsense_of_another_host_is_seen(said: wire.States, why: str) -> None:
    assert said.problem() == why
