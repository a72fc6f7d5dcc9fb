"""Which hosts keep whose state: failure domains, unequal memory, and what a file of domains may say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import domains_of, holders, in_use, nearest, read_domains, shared_domains
from jitckpt.decisions.placement import Machine, place


@given(st.integers(1, 12), st.integers(1, 4), st.sampled_from([1e9, float("inf")]))
def test_alike_hosts_are_placed_as_in_the_paper(hosts: int, copies: int, memory: float) -> None:
    placed = holders([Machine((), memory)] * hosts, copies)
    assert placed.holders == place([Machine()] * hosts, min(copies, hosts), 0).holders


def test_memory_that_differs_a_little_changes_nothing() -> None:
    machines = [Machine((), 1e9 + 1e6 * host) for host in range(6)]
    assert holders(machines, 2).holders == place([Machine()] * 6, 2, 0).holders


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=8), st.integers(2, 3))
def test_there_are_always_as_many_holders_as_wanted(memory: list[int], copies: int) -> None:
    placed = holders([Machine((), one) for one in memory], copies)
    for host, held_by in enumerate(placed.holders):
        assert held_by[0] == host
        assert len(set(held_by)) == min(copies, len(memory))


def test_a_host_with_little_memory_keeps_less() -> None:
    placed = holders([Machine((), 64e9), Machine((), 64e9), Machine((), 64e9), Machine((), 8e9)], 2)
    hosted = placed.hosted()
    assert hosted[3] == min(hosted) == 0


def test_copies_go_to_other_racks() -> None:
    machines = [Machine((rack,)) for rack in ("a", "a", "b", "b")]
    placed = holders(machines, 2)
    for held_by in placed.holders:
        assert len({machines[host].domains for host in held_by}) == 2
    assert shared_domains(machines, placed) == []


def test_domains_that_can_not_be_avoided_are_named() -> None:
    machines = [Machine(("feed", rack)) for rack in ("a", "b", "c")]
    assert shared_domains(machines, holders(machines, 2)) == ["feed"]


def test_in_the_place_of_a_holder_comes_first_who_shares_nothing() -> None:
    machines = [
        Machine(("feed-1", "a")),
        Machine(("feed-1", "a")),
        Machine(("feed-1", "b")),
        Machine(("feed-2", "c")),
    ]
    assert nearest(machines, 0, [1, 2, 3]) == [3, 2, 1]


def test_hosts_that_name_different_numbers_of_domains_are_refused() -> None:
    with pytest.raises(InvalidInput, match="different numbers"):
        holders([Machine(("a",)), Machine(())], 2)


SLURM, OPTION = "Slurm", ""


@pytest.mark.parametrize(
    ("domains", "by", "used"),
    [
        (["s1", "s2", "s1"], [SLURM] * 3, ["s1", "s2", "s1"]),
        (["s1", "s1", "s1"], [SLURM] * 3, [None] * 3),  # nobody has asked for what can't be kept clear of
        (["s1", "s1", "s1"], [OPTION] * 3, ["s1"] * 3),
        (["s1", "s2", None], [SLURM, SLURM, OPTION], [None] * 3),  # a host that is in no step of Slurm's
        (["s1", "r1", "r2"], [SLURM, OPTION, OPTION], [None, "r1", "r2"]),  # refused, as before
    ],
)
def test_what_a_scheduler_names_counts_where_it_tells_hosts_apart(
    domains: list[str | None], by: list[str], used: list[str | None]
) -> None:
    def of_hosts(names: list[str | None]) -> list[tuple[str, ...]]:
        return [(name,) if name else () for name in names]

    assert in_use(of_hosts(domains), by) == of_hosts(used)


def test_a_file_of_domains() -> None:
    known = read_domains("# host feed rack\nnode-1 f1 r1\n\nnode-2 f1 r2 # a note\n")
    assert known == {"node-1": ("f1", "r1"), "node-2": ("f1", "r2")}
    assert domains_of(known, ["node-2.example.org", "node-2"]) == ("f1", "r2")
    with pytest.raises(InvalidInput, match=r"does not name this host \(node-3, 10\.0\.0\.3\)"):
        domains_of(known, ["node-3", "10.0.0.3"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it names no host"),
        ("# nothing", "it names no host"),
        ("node-1", "line 1: node-1 is in no failure domain"),
        ("node-1 a\nnode-1 b", "line 2: node-1 has a line already"),
        ("node-1 a\nnode-2 a b", "line 2: node-2 is in 2 failure domains and the first host in 1"),
    ],
)
def test_what_a_file_may_not_say(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_domains(text)
