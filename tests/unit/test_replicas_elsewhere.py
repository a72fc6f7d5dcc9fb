"""Which shards have no replica on another host, and where copies go: against brute force, and by agents."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_host_memory import made
from test_protection import Agents

from jitckpt.decisions import replicas
from jitckpt.decisions.placement import Machine
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, shard
from jitckpt.tiers.host_memory import BEGUN, READY
from jitckpt.tiers.shard import CHUNK
from jitckpt.tiers.tier import Shard

RANKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8)
DOMAINS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("cd")), min_size=2, max_size=5)


@given(RANKS)
def test_a_rank_is_alone_where_the_loss_of_its_host_takes_all_that_hold_the_same(
    ranks: list[tuple[int, int]],
) -> None:
    """Played through: each host, or device where there is one host, is lost, and it is looked who is left."""
    shards, hosts = [shard for shard, _ in ranks], [host for _, host in ranks]
    places = hosts if len(set(hosts)) > 1 else list(range(len(ranks)))
    found = replicas.elsewhere(shards, hosts)
    for lost in set(places):
        left = {rank for rank in range(len(ranks)) if places[rank] != lost}
        for rank in set(range(len(ranks))) - left:
            assert set(found[rank]) == {other for other in left if shards[other] == shards[rank]}


@given(DOMAINS, st.data())
def test_copies_go_beside_replicas_as_far_as_that_shares_no_more_domains(
    domains: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Of all hosts in the place of those that are placed there is none better."""
    machines, owner = [Machine(one) for one in domains], 0
    others = list(range(1, len(machines)))
    placed = data.draw(st.permutations(others))[: data.draw(st.integers(1, len(others)))]
    beside = data.draw(st.sets(st.sampled_from(range(len(machines)))))
    found = replicas.holders_beside(machines, owner, placed, sorted(beside))

    def shared(host: int) -> int:
        return sum(one == other for one, other in zip(domains[owner], domains[host], strict=True))

    def may(way: tuple[int, ...]) -> bool:
        pairs = zip(sorted(map(shared, way)), sorted(map(shared, placed)), strict=True)
        return all(one <= other for one, other in pairs)

    assert len(set(found)) == len(placed)
    assert owner not in found
    assert may(tuple(found)), "no more domains are shared than before"
    most = max(len(beside & {*way}) for way in permutations(others, len(placed)) if may(way))
    assert len(beside & {*found}) == most


def test_what_is_done_and_why_is_one_sentence() -> None:
    assert replicas.in_words([(), ()], 2) == (
        "no other host holds what ranks 0, 1 hold: it is kept in host memory, and sent to one"
    )
    assert replicas.in_words([(), ()], 1) == (
        "no other device holds what ranks 0, 1 hold: it is kept in host memory"
    )
    assert replicas.in_words([(), (2,), (1,)], 3) == (
        "no other host holds what rank 0 holds: it is kept in host memory, and sent to one. Ranks 1, 2 keep "
        "the same steps, but only what their replicas on another host do not hold is sent, and goes there"
    )


SHARED = os.urandom(3 * CHUNK)  # what the ranks 1 and 2 hold alike
OWN = CHUNK  # bytes that each rank alone holds


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Placed as a ring: the copies of host 1 would go to host 2, those of host 2 to host 0."""
    with closing(Agents(str(tmp_path), 3, mode="auto", every=1)) as found:
        found.start()
        yield found


def put(agents: Agents, rank: int, step: int) -> bytes:
    memory = agents.tiers[rank].memory
    host_memory.put_word(memory.of(rank), READY, 1)
    host_memory.put_word(memory.of(rank), BEGUN, step)
    identity = Identity("job", "fingerprint", 3, rank, min(rank, 1), 2)
    data = (os.urandom(3 * CHUNK) if rank == 0 else SHARED) + os.urandom(OWN)
    one = made(step, data, identity=identity)
    index = shard.parse_index(one.index, one.seal)
    encoded = replace(index, replicas=[3 - rank] if rank else []).encode()
    seal = shard.seal_of(encoded, step, one.seal.data_bytes)
    memory.put(Shard(rank, one.slot, seal, encoded, one.window))
    return data


def test_what_a_replica_elsewhere_holds_is_not_sent_and_comes_back(agents: Agents) -> None:
    for step in (1, 2, 3):
        data = [put(agents, rank, step) for rank in range(3)]
        agents.until_safe(step)
    sizes = [one._own[rank].size for rank, one in enumerate(agents.protections)]
    assert sizes[0] > len(SHARED) + OWN, "no other host has it"
    assert all(OWN < size < OWN + CHUNK for size in sizes[1:])
    first = agents.protections[0]
    assert first._keepers == {0: [0, 1], 1: [1, 2], 2: [2, 1]}
    assert [first.step_that_stays([host]) for host in range(3)] == [3, 3, 3]
    assert first.step_that_stays([1, 2]) is None
    agents.tiers[2].memory.close()
    agents.meet()
    assert not any(tier.lacks_copies for tier in agents.tiers)
    agents.gather()
    assert host_memory.read(agents.tiers[2].memory.of(2), 3)[1].tensors["big"].numpy().tobytes() == data[2]
