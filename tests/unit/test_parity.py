"""The agents' parity: it grows with the shards' pieces, and gives back what any one host of a group had."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_host_memory import made
from test_protection import Agents, until

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.cli.inspect import memory_table
from jitckpt.decisions.decoding import decodable
from jitckpt.decisions.memory_wanted import tier
from jitckpt.decisions.redundancy import keepers, layout, survives
from jitckpt.decisions.sources import NOBODY, Kind, Parity, Source, decide
from jitckpt.errors import SaveError
from jitckpt.events import EventLog
from jitckpt.reports import memory_inspection
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, parity, shard
from jitckpt.tiers.parity import ParityMember, ParityMemory, ParityPiece, Stripe
from jitckpt.tiers.parity_peers import PeerParity
from jitckpt.wire.hosts import Host

HOSTS = 4
ALL = bool(os.environ.get("JITCKPT_ALL_LOSSES"))
# Chunks of the ranks' shards: unequal, one of them less than a chunk, one with a short end.
SIZES = (2.5, 0.01, 7, 4)


def data_of(rank: int, step: int) -> bytes:
    size = int(SIZES[rank] * shard.CHUNK)
    return bytes([rank, step, 77]) * (size // 3)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(str(tmp_path), HOSTS, copies=HOSTS, mode="parity")
    found.start()
    yield found
    found.close()


def put(agents: Agents, rank: int, step: int) -> None:
    host_memory.put_word(agents.tiers[rank].memory.of(rank), host_memory.READY, 1)
    identity = Identity("job", "fingerprint", HOSTS, rank, rank, HOSTS)
    agents.tiers[rank].memory.put(made(step, data_of(rank, step), identity=identity))


def make_steps(agents: Agents, *steps: int) -> None:
    for step in steps:
        for rank in range(HOSTS):
            put(agents, rank, step)
        agents.until_safe(step)


def lose(agents: Agents, host: int) -> None:
    """Forget all that a host has in memory: another one comes in its place."""
    tier = agents.tiers[host]
    tier.memory.close()
    assert tier.parity is not None
    tier.parity.parities.close()


def parities(agents: Agents, host: int) -> ParityMemory:
    tier = agents.tiers[host]
    assert tier.parity is not None
    return tier.parity.parities


def gather(agents: Agents) -> None:
    agents.meet()
    agents.gather()


def is_there(agents: Agents, rank: int, step: int) -> bool:
    _, state = host_memory.read(agents.tiers[rank].memory.of(rank), step)
    return bool(state.tensors["big"].numpy().tobytes() == data_of(rank, step))


def reason(agents: Agents, host: int) -> str:
    told = [event for event in agents.tiers[host]._log.events if event["event"] == "memory_sources"]
    return str(told[-1]["reason"])


def flip(window: object, at: int = 5) -> None:
    """Change a byte of what is kept."""
    data = memoryview(window)  # type: ignore[arg-type]
    data[at] ^= 1


def test_hosts_keep_their_own_shards_and_parity_and_nothing_else(agents: Agents) -> None:
    make_steps(agents, 1, 2)
    for host in range(HOSTS):
        assert agents.held(host) == {(host, 1), (host, 2)}
        held = parities(agents, host).has()
        assert {(one.group, one.place, one.step) for one in held} == {
            ((0, 1, 2, 3), host, step) for step in (1, 2)
        }
        longest = max(SIZES[rank] for rank in range(HOSTS) if rank != host)
        assert all(one.bytes < (longest // (HOSTS - 1) + 1.1) * shard.CHUNK for one in held)


@pytest.mark.parametrize("lost", range(HOSTS))
def test_any_one_lost_host_comes_back_bit_for_bit(agents: Agents, lost: int) -> None:
    make_steps(agents, 1, 2)
    assert agents.protections[0].step_that_stays([lost]) == 2
    lose(agents, lost)
    gather(agents)
    assert is_there(agents, lost, 2)
    assert f"rank {lost} from parity in other hosts' memory" in reason(agents, lost)


def test_what_has_not_come_to_another_host_is_not_counted_on(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 takes nothing in: without host 2 its part of host 2's shard would be missing."""
    add = PeerParity.add

    def refused(peer: PeerParity, *of: Any) -> None:
        if peer._host == 1:
            raise SaveError("no room")
        add(peer, *of)

    monkeypatch.setattr(PeerParity, "add", refused)
    make_steps(agents, 1)
    assert agents.protections[3].step_that_stays([2]) is None
    assert agents.protections[3].step_that_stays([1]) == 1
    assert agents.protections[3].step_that_stays([]) == 1


def test_a_parity_that_lacks_anybodys_part_is_not_counted_on(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 1 has no room for rank 3's part: its parity is never whole, so it gives back nothing of others."""
    add = PeerParity.add

    def refused(peer: PeerParity, piece: ParityPiece, window: Any) -> None:
        if (peer._host, piece.rank) == (1, 3):
            raise SaveError("no room")
        add(peer, piece, window)

    monkeypatch.setattr(PeerParity, "add", refused)
    make_steps(agents, 1)
    assert agents.protections[0].step_that_stays([1]) == 1
    assert agents.protections[0].step_that_stays([2]) is None
    lose(agents, 2)
    gather(agents)
    assert (2, 1) not in agents.held(2), "nor does it come back"


def test_two_lost_hosts_of_a_group_are_too_many(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    make_steps(agents, 1)
    assert agents.protections[0].step_that_stays([0, 3]) is None
    lose(agents, 0)
    lose(agents, 3)
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.memory_tier.say", said.append)
    gather(agents)
    assert agents.held(0) == set()
    assert all("more is lost than its parity can give back" in text for text in said)
    assert len(said) == HOSTS, "here all of them lead"
    assert not any(event["event"] == "memory_sources" for event in agents.tiers[0]._log.events)


def test_of_too_few_hosts_each_keeps_the_others_state_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.memory_tier.say", said.append)
    agents = Agents(str(tmp_path), 2, copies=HOSTS, mode="parity")
    try:
        agents.start()
        assert sum("parity needs 3 hosts, and 2 are here" in text for text in said) == 1
        for rank in range(2):
            agents.put(rank, 1)
        agents.until_safe(1)
        assert all(agents.held(host) == {(0, 1), (1, 1)} for host in range(2))
        assert agents.tiers[0].variables(1) == agents.tiers[1].variables(1)
        agents.tiers[1].memory.close()
        agents.meet()
        agents.gather()
        assert (1, 1) in agents.held(1)
    finally:
        agents.close()


def test_after_a_loss_a_new_step_protects_again(agents: Agents) -> None:
    make_steps(agents, 1, 2)
    lose(agents, 1)
    gather(agents)
    make_steps(agents, 3)
    lose(agents, 2)
    gather(agents)
    assert is_there(agents, 2, 3)


def test_a_damaged_shard_is_decoded_on_its_own_host(agents: Agents) -> None:
    make_steps(agents, 1, 2)
    flip(agents.tiers[2].memory.shard(2, 2, "first").window)
    gather(agents)
    assert is_there(agents, 2, 2)


@pytest.mark.parametrize("piece", ["parity", "shard"])
def test_a_damaged_piece_is_passed_over_and_it_is_decided_again(agents: Agents, piece: str) -> None:
    make_steps(agents, 1, 2)
    lose(agents, 0)
    if piece == "parity":
        flip(parities(agents, 3).find(Stripe((0, 1, 2, 3), 3), 2, "first")[2])
    else:
        flip(agents.tiers[2].memory.shard(2, 2, "first").window, 3 * shard.CHUNK)  # under host 1's parity
    gather(agents)
    assert is_there(agents, 0, 1), "the step before is whole"
    found = {
        "parity": "Step 2 of the parity of ranks 0, 1, 2 in the memory of host 3 has failed its check",
        "shard": "Step 2 of rank 2 in their own host's memory has failed its check",
    }
    assert found[piece] in reason(agents, 0)


def test_a_host_goes_back_with_one_whose_own_copy_is_damaged(agents: Agents) -> None:
    """Host 0's shard is decoded without the damaged chunk, which is under the parity that it has lost."""
    make_steps(agents, 1, 2)
    lose(agents, 0)
    flip(agents.tiers[2].memory.shard(2, 2, "first").window)
    gather(agents)
    for rank in range(HOSTS):
        assert is_there(agents, rank, 1)


def test_a_piece_that_comes_twice_is_in_the_parity_once(agents: Agents) -> None:
    """A host that was sent a piece, and whose answer was lost, is sent it again."""
    make_steps(agents, 1)
    for protection in agents.protections:
        protection._put(protection._holders[0], protection._index, 1)
    lose(agents, 2)
    gather(agents)
    assert is_there(agents, 2, 1)


def test_a_step_that_not_all_have_sent_takes_the_place_of_no_whole_one(agents: Agents) -> None:
    make_steps(agents, 1)
    for step in (2, 3):
        put(agents, 0, step)
        until(lambda: agents.look() or max(agents.protections[0]._own[0].sent) == step)  # noqa: B023
        host_memory.unseal(agents.tiers[0].memory.of(0), step % 2)
        host_memory.unseal(agents.tiers[0].memory.of(0), 1)
        put(agents, 0, 1)
    for host in range(1, HOSTS):
        assert [one.step for one in parities(agents, host).has()] == [1]


def test_what_does_not_belong_there_is_refused(agents: Agents) -> None:
    make_steps(agents, 1)
    one = agents.tiers[1].memory.shard(1, 1, "first")
    member = ParityMember(one.slot, one.seal, one.index)
    of = parities(agents, 0)
    with pytest.raises(SaveError, match="is not for this parity"):
        of.begin(0, ParityPiece(2, Stripe((0, 1, 2, 3), 0), member, 0))
    owner = agents.tiers[0].parity
    assert owner is not None
    with pytest.raises(SaveError, match="is not for this host to keep"):
        owner.number_of(Stripe((0, 1, 2, 3), 1))
    with pytest.raises(SaveError, match="has no parity"):
        of.find(Stripe((0, 1, 2, 3), 1), 1, "first")
    seal, encoded, _ = of.find(Stripe((0, 1, 2, 3), 0), 1, "first")
    assert parity.parse_index(encoded, seal).encode() == encoded
    with pytest.raises(SaveError, match="is damaged"):
        parity.parse_index(encoded[:-1] + b" ", seal)
    for nonsense in (b"{}", encoded.replace(b"[0,1,2,3]", b"[0,1,2]"), encoded.replace(b'"1":', b'"7":')):
        with pytest.raises(SaveError, match="makes no sense"):
            parity.parse_index(nonsense, shard.seal_of(nonsense, 1, seal.data_bytes))


def test_too_little_memory_for_parity_is_said(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.protection.say", said.append)
    parities(agents, 2)._limit = 0
    make_steps(agents, 1)
    assert any("less protected: host 2" in text and "--memory-limit" in text for text in said)


def test_the_keeper_holds_parities_too(tmp_path: Path) -> None:
    agents = Agents(str(tmp_path), 3, copies=3, mode="parity")
    agents.start()
    tier = agents.tiers[0]
    assert tier.parity is not None
    number = tier._number_of_stripe(Stripe((0, 1, 2), 0))
    mine = os.fstat(tier.parity.parities.of(number)).st_ino
    tier.close(end=False)  # as if it was killed
    again = type(tier)(tier.wanted, agents.job, tier._log)
    assert again._parity is not None
    assert os.fstat(again._parity.parities.of(number)).st_ino == mine
    assert again.memory.descriptors.keys() & {-1} == set()
    again.close(end=True)
    agents.tiers = agents.tiers[1:]
    agents.close()


@settings(deadline=None)
@given(st.integers(3, 6), st.data())
def test_what_is_decided_is_what_survives(members: int, data: st.DataObject) -> None:
    """The policy finds a step exactly where the planner's pure function says that it is still there."""
    copies = data.draw(st.integers(0, members - 3))
    group = tuple(data.draw(st.sampled_from([member, NOBODY])) for member in range(members))
    lost = data.draw(st.sets(st.integers(0, members - 1), max_size=3))
    sources = [
        Source(rank, 5, Kind.OWN_MEMORY if host == place else Kind.PEER_MEMORY, "a", host)
        for place, rank in enumerate(group)
        for host in keepers(members, place, copies)
        if rank != NOBODY and host not in lost
    ]
    there = [Parity(group, host, 5, "a", host, 10, copies) for host in range(members) if host not in lost]
    found = [*sources, *decodable(sources, there)]
    ranks = [rank for rank in group if rank != NOBODY]
    nowhere = set(ranks) - {one.rank for one in sources}
    plan = decide(ranks, found)
    if survives(layout(members, copies, parity=True), lost) and ranks:
        assert plan is not None
        assert {rank for rank, one in plan.sources.items() if one.kind == Kind.PARITY} == nowhere
        failed = [piece for one in plan.sources.values() for piece in one.made_of[:1]]
        if failed:
            assert decide(ranks, found, failed) is None
    elif len(nowhere) > 1 and copies == 0:
        assert plan is None


class Both(Agents):
    """Five agents: each state is on one other host, too, and has parity over all five."""

    def start(self) -> None:
        both = replace(tier(f"peer=2+parity={self.count}"), limit=1 << 30)
        self.tiers = [MemoryTier(both, self.job, EventLog()) for _ in range(self.count)]
        self.meet()

    def put(self, rank: int, step: int, data: bytes = b"") -> None:
        super().put(rank, step, bytes([rank, step, 77]) * (shard.CHUNK // 2))


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    found = Both(str(tmp_path), 5)
    found.start()
    yield found
    found.close()


def test_of_five_hosts_with_a_copy_and_parity_any_two_may_be_lost(both: Both) -> None:
    """Those next to each other, too: of the first what is left is under the parity of the other three."""

    def bytes_of(rank: int, step: int) -> bytes:
        _, state = host_memory.read(both.tiers[rank].memory.of(rank), step)
        return bytes(state.tensors["big"].numpy().tobytes())

    losses = [(0, 1), (4, 0), (1, 3)] if not ALL else [*combinations(range(5), 2)]
    for step, lost in enumerate(losses, 1):
        for rank in range(5):
            both.put(rank, step)
        both.until_safe(step)
        made = [bytes_of(rank, step) for rank in range(5)]
        held = {(rank, newest) for rank, newest in both.held(2) if newest == step}
        assert held == {(2, step), (1, step)}, "its own and the one before it"
        assert both.protections[0].step_that_stays(lost) == step
        assert both.protections[0].step_that_stays((*lost, 2)) is None
        for host in lost:
            lose(both, host)
        gather(both)
        assert [bytes_of(rank, step) for rank in range(5)] == made, lost
        decoded = f"rank {lost[0]} from parity in other hosts' memory" in reason(both, lost[0])
        assert decoded == (lost in {(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)})


def test_of_two_lost_hosts_a_copy_is_written_by_the_host_that_has_it(both: Both) -> None:
    for rank in range(5):
        both.put(rank, 1)
    both.until_safe(1)
    for host in (0, 3, 4):
        here, nowhere = both.protections[host].ranks_of([1, 2])
        assert here == ({2} if host == 3 else set())
        assert nowhere == {1}, "from parity nothing is decoded as the job ends"


def test_a_host_takes_neither_anothers_copy_nor_cell(both: Both) -> None:
    peer = PeerParity(both.hosts[0], 3)
    both.put(0, 1)
    one = both.tiers[0].memory.shard(0, 1, "first")
    with pytest.raises(SaveError, match="Rank 0's state is not for this host to keep"):
        peer.put(one)
    member = ParityMember(one.slot, one.seal, one.index)
    with pytest.raises(SaveError, match="is not for this host to keep"):
        peer.add(ParityPiece(0, Stripe((0, 1, 2, 3, 4), 3), member, 0), one.window)
    with pytest.raises(SaveError, match="No group of hosts has a parity 3 beside 4 copies"):
        peer.parity_index(Stripe((0, 1, 2, 3, 4), 3, 4), 1, "first")


def test_too_few_hosts_for_copies_and_parity_have_copies_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = Both(str(tmp_path), 5)
    few.start()
    few.tiers.pop().close(end=True)
    few.tiers.pop().close(end=True)
    few.count = 3
    few.meet()
    for rank in range(3):
        few.put(rank, 1)
    few.until_safe(1)
    assert [few.held(host) for host in range(3)] == [{(0, 1), (1, 1), (2, 1)}] * 3
    assert "parity needs 4 hosts, and 3 are here; until more come, 3 hosts have" in capsys.readouterr().err
    few.close()


def test_what_is_inspected_tells_parity_from_shards(agents: Agents) -> None:
    make_steps(agents, 1)
    descriptor = parities(agents, 1).of(0)
    (found,) = memory_inspection._in(7, descriptor, True)
    assert (found.rank, found.step, found.parity_of, found.problem) == (-1, 1, (0, 2, 3), "")
    assert "parity of 0, 2, 3" in str(list(memory_table([found]).columns[1].cells))
    flip(parities(agents, 1).find(Stripe((0, 1, 2, 3), 1), 1, "first")[2])
    (found,) = memory_inspection._in(7, descriptor, True)
    assert "Chunk 0 of the parity of step 1 is damaged" in found.problem


def test_hosts_with_unequal_ranks_and_several_groups(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = agents.tiers[0].parity
    assert owner is not None
    monkeypatch.setattr(owner, "_size", 3)
    ranks = [(0, 1), (2,), (3, 4), (5, 6), (7, 8), (9,), (10,)]
    met = agents.hosts[0]
    met.all = tuple(Host("127.0.0.1", 1, of, 0) for of in ranks)
    owner.meet(met)
    assert owner.group_of(0) == (0, 1, 2)
    assert owner.group_of(6) == (3, 4, 5, 6)
    assert [owner.number_of(Stripe(group, 0)) for group in ((0, 2, 3), (1, NOBODY, 4))] == [0, 1]
    assert owner.share == 1.5
    assert owner.survives([1, 5])
    assert not owner.survives([3, 6])
