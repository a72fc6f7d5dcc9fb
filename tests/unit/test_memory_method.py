"""What `--memory-tier auto` chooses, against every way that there is."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions import memory_method, pace
from jitckpt.decisions.holders import holders
from jitckpt.decisions.memory_method import MARGIN, HostStates
from jitckpt.decisions.memory_wanted import GROUP
from jitckpt.decisions.placement import Machine
from jitckpt.decisions.redundancy import groups, layout, survives

MEBIBYTE = 1 << 20
SECONDS = st.floats(1e-3, 1e3)


@st.composite
def jobs(draw: st.DrawFn, *, least: int = 1) -> list[HostStates]:
    """Draw hosts with up to three ranks each, and memory from too little for their own to plenty."""
    found = []
    for _ in range(draw(st.integers(least, 9))):
        chunks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        states = [count * MEBIBYTE for count in chunks]
        sent = [draw(st.integers(1, one)) for one in states] if draw(st.booleans()) else []
        went = [draw(st.integers(one, 3 * one)) for one in sent]
        memory = draw(st.floats(1.0, 8.0)) * sum(states)
        found.append(HostStates(states, memory, sent, chunks, went))
    return found


def in_a_ring(count: int) -> list[list[int]]:
    return [[host, (host + 1) % count] if count > 1 else [host] for host in range(count)]


def kept_with_parity(hosts: Sequence[HostStates]) -> list[int]:
    """Return the bytes of one step in each host's memory, chunk by chunk."""
    found = [0] * len(hosts)
    for group in groups(len(hosts), GROUP):
        plan = layout(len(group), parity=True)
        for rank in range(max(len(hosts[member].states) for member in group)):
            for host in group:
                if rank < len(hosts[host].states):
                    found[host] += hosts[host].states[rank]
            for member, cells in plan.parity:
                sizes = [
                    chunks_of_cell(hosts[group[shard]].chunks[rank], number, len(group) - 1)
                    for shard, number in cells
                    if rank < len(hosts[group[shard]].states)
                ]
                found[group[member]] += max(sizes, default=0) * MEBIBYTE
    return found


def chunks_of_cell(chunks: int, number: int, cells: int) -> int:
    """Count them one by one: each cell takes as many as it can, and as many as the first one."""
    left, length = list(range(chunks)), -(-chunks // cells)
    for _ in range(number):
        left = left[length:]
    return len(left[:length])


@given(jobs())
def test_parity_takes_what_its_cells_take(hosts: list[HostStates]) -> None:
    if len(hosts) < 3:
        return
    expected = [2 * MARGIN * size for size in kept_with_parity(hosts)]
    assert memory_method.for_parity(hosts) == pytest.approx(expected)


@given(jobs())
def test_parity_is_chosen_where_it_alone_has_room(hosts: list[HostStates]) -> None:
    placed = in_a_ring(len(hosts))
    chosen = memory_method.by_memory(hosts, placed)
    copies = all(
        2 * MARGIN * sum(sum(hosts[owner].states) for owner, by in enumerate(placed) if host in by)
        <= one.memory * (1 + 1e-9)
        for host, one in enumerate(hosts)
    )
    parity = len(hosts) > 2 and all(
        2 * MARGIN * size <= one.memory * (1 + 1e-9)
        for one, size in zip(hosts, kept_with_parity(hosts), strict=True)
    )
    assert chosen.parity == (parity and not copies)
    assert (chosen.text == "") == copies
    if chosen.parity:  # any one host may be lost
        for group in groups(len(hosts), GROUP):
            plan = layout(len(group), parity=True)
            assert all(survives(plan, [lost]) for lost in range(len(group)))


@given(jobs(least=2), SECONDS, SECONDS)
def test_of_whole_states_and_gradients_that_is_chosen_which_is_made_most_often(
    hosts: list[HostStates], snapshot: float, step: float
) -> None:
    placed = in_a_ring(len(hosts))
    every = pace.steps_between(snapshot, step)
    ways = [(every, 1.0, False)]  # steps between, bytes of a state that go each time
    if may_be_gradients(hosts, placed, snapshot, step):
        ways.append((1, max(sum(one.sent) / sum(one.went) for one in hosts), True))
    best = min(ways, key=lambda way: (way[0], way[2]))
    chosen = memory_method.by_traffic(snapshot, step, hosts, placed)
    assert (chosen.every, chosen.gradients) == (best[0], best[2])
    never = memory_method.by_traffic(snapshot, step, hosts, placed, may_be_gradients=False)
    assert (never.every, never.gradients) == (every, False)
    assert "gradients" not in never.text


def may_be_gradients(
    hosts: Sequence[HostStates], placed: Sequence[Sequence[int]], snapshot: float, step: float
) -> bool:
    if not all(one.sent for one in hosts) or snapshot - step > 4:
        return False
    share = max(sum(one.sent) / sum(one.went) for one in hosts)
    made = max(
        sum(sum(hosts[owner].sent) for owner, by in enumerate(placed) if host in by[1:])
        for host in range(len(hosts))
    )
    if snapshot * share + made / 1e9 > 0.8 * step:
        return False
    for host, one in enumerate(hosts):
        kept = [owner for owner, by in enumerate(placed) if host in by]
        if 2 * MARGIN * sum(sum(hosts[o].states) + sum(hosts[o].sent) for o in kept) > one.memory:
            return False
        largest = max(map(sum, zip(one.states, one.sent, strict=True)))
        if 2 * MARGIN * largest > one.memory / len(one.states):
            return False
    return True


def alike(count: int, **more: object) -> list[HostStates]:
    one = HostStates([12 * MEBIBYTE], 100 * MEBIBYTE, [4 * MEBIBYTE], [3], [12 * MEBIBYTE])
    return [replace(one, **more) for _ in range(count)]  # type: ignore[arg-type]


def test_the_lines_say_why() -> None:
    ring = in_a_ring(3)
    lacks = "host 0 would need 50.4 MiB of memory, and may take 45 MiB"
    assert memory_method.by_memory(alike(3, memory=45.0 * MEBIBYTE), ring).text == (
        f"XOR parity in the place of copies, which have no room: {lacks}"
    )
    assert memory_method.by_memory(alike(2, memory=45.0 * MEBIBYTE), in_a_ring(2)).text == (
        f"copies, since parity needs 3 hosts, although {lacks}"
    )
    assert "since parity has no room either" in memory_method.by_memory(alike(3, memory=1.0), ring).text
    assert memory_method.by_traffic(0.9, 0.4, alike(3), ring).text == (
        "gradients, with which other hosts make the optimizer's steps again, after each step: they have 33% "
        "of the bytes of whole states, which take 0.9 s beside the training until they are whole everywhere, "
        "3 steps of 0.4 s"
    )


@pytest.mark.parametrize(
    ("hosts", "snapshot", "step", "why"),
    [
        (alike(3, sent=[]), 0.9, 0.4, "not all ranks' optimizer steps can be made again on another host"),
        (alike(3), 2.0, 0.4, "they would take about 0.671 s, too long for each step"),
        (alike(3, memory=60.0 * MEBIBYTE), 0.9, 0.4, "they take room: host 0 would need 67.2 MiB of memory"),
        (alike(3), 9.0, 4.0, "the training would wait 5 s once, for the first copy"),
    ],
)
def test_why_no_gradients_are_sent_is_said(
    hosts: list[HostStates], snapshot: float, step: float, why: str
) -> None:
    chosen = memory_method.by_traffic(snapshot, step, hosts, in_a_ring(3))
    assert not chosen.gradients
    assert f"; no gradients, since {why}" in chosen.text


def test_a_host_alone_has_nobody_to_send_gradients_to() -> None:
    chosen = memory_method.by_traffic(0.9, 0.4, alike(1), [[0]])
    assert "not all hosts have another one" in chosen.text


def test_copies_go_where_the_placement_has_them() -> None:
    """A host with little memory gets none, and so nothing speaks against copies."""
    hosts = alike(4)
    hosts[2] = replace(hosts[2], memory=30.0 * MEBIBYTE)
    placed = holders([Machine((), one.memory) for one in hosts], 2).holders
    assert not memory_method.by_memory(hosts, placed).parity
    assert memory_method.by_memory(hosts, in_a_ring(4)).parity is False, "parity has no room there either"


def test_a_wait_counts_from_a_share_of_the_steps_on() -> None:
    assert not memory_method.waits_too_long([(3, 1.0), (11, 1.15)], 1.0)
    assert memory_method.waits_too_long([(3, 1.0), (11, 1.17)], 1.0)
