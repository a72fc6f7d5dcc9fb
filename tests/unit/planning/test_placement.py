import itertools
import math
from collections import Counter
from collections.abc import Iterable

import pytest
from descriptions import failure, large
from descriptions import text as cluster_text
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.placement import BUFFERS, Machine, mixed_placement, place, ring_placement
from jitckpt.planning.cluster import Description, parse_description
from jitckpt.planning.policies import Gemini, lost_by, parse_policy


def in_racks(*sizes: int, memory_bytes: float = math.inf) -> list[Machine]:
    return [Machine((f"rack-{rack}",), memory_bytes) for rack, size in enumerate(sizes) for _ in range(size)]


def test_algorithm_1() -> None:
    assert mixed_placement(4, 2).holders == ((0, 1), (1, 0), (2, 3), (3, 2))
    five = mixed_placement(5, 2)
    assert five.strategy == "mixed"
    assert five.holders == ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    assert ring_placement(4, 2).holders == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert mixed_placement(3, 1).holders == ((0,), (1,), (2,))
    assert mixed_placement(1, 1).holders == ((0,),)


@given(st.integers(1, 60), st.data())
def test_mixed_gives_every_checkpoint_its_replicas_and_every_machine_the_same_load(
    machines: int, data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(1, machines))
    placement = mixed_placement(machines, replicas)
    for machine, holder in enumerate(placement.holders):
        assert holder[0] == machine
        assert len(set(holder)) == replicas
    assert set(placement.hosted()) == {replicas - 1}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 4))
def test_replicas_never_share_a_rack_when_that_is_possible(sizes: list[int], replicas: int) -> None:
    """With unlimited memory: whenever there are as many racks as replicas."""
    machines = in_racks(*sizes)
    count = sum(sizes)
    if replicas > count:
        with pytest.raises(InvalidInput, match="replicas is"):
            place(machines, replicas, 1.0)
        return
    placement = place(machines, replicas, 1.0)
    racks = [machine.domains[0] for machine in machines]
    shared = any(len({racks[host] for host in holder}) < replicas for holder in placement.holders)
    assert shared == (len(sizes) < replicas)
    assert (placement.avoids == (0,)) == (not shared)
    for machine, holder in enumerate(placement.holders):
        assert holder[0] == machine
        assert len(set(holder)) == replicas


def test_the_largest_domain_that_can_be_avoided_is() -> None:
    machines = [Machine((f"feed-{i // 8}", f"switch-{i // 4}", f"rack-{i // 2}")) for i in range(16)]
    assert place(machines, 2, 1.0).avoids == (0, 1, 2)  # two power feeds
    three = place(machines, 3, 1.0)
    assert three.avoids == (1, 2)  # three copies cannot avoid two feeds, but four switches
    for holder in three.holders:
        assert len({machines[host].domains[1] for host in holder}) == 3


def test_groups_are_kept_when_they_are_safe() -> None:
    placement = place(in_racks(4, 4, 4, 4), 2, 1.0)
    assert placement.strategy == "group"
    assert Counter(frozenset(holder) for holder in placement.holders).most_common()[-1][1] == 2
    assert place(in_racks(3, 3, 1), 2, 1.0).strategy == "shifted ring"


def test_a_name_is_one_domain_wherever_it_appears() -> None:
    machines = [Machine(("feed-0", "switch-0")), Machine(("feed-1", "switch-0"))]
    assert place(machines, 2, 1.0).avoids == (0,)


def apart(machines: list[Machine], kinds: Iterable[int], hosts: Iterable[int]) -> bool:
    chosen = list(hosts)
    return all(len({machines[host].domains[kind] for host in chosen}) == len(chosen) for kind in kinds)


def avoidable(machines: list[Machine], kinds: tuple[int, ...], replicas: int) -> bool:
    """Whether every machine has other ones that are all apart: by trying all."""
    count = range(len(machines))
    return all(
        any(
            apart(machines, kinds, (owner, *others))
            for others in itertools.combinations([i for i in count if i != owner], replicas - 1)
        )
        for owner in count
    )


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9), st.integers(1, 4))
def test_kinds_of_domains_that_cross_each_other_are_avoided_together_where_possible(
    feeds_and_switches: list[tuple[int, int]], replicas: int
) -> None:
    """A power feed that has some racks of several switches, and the other way round."""
    machines = [Machine((f"feed-{f}", f"switch-{s}")) for f, s in feeds_and_switches]
    if replicas > len(machines):
        return
    placement = place(machines, replicas, 1.0)
    expected: tuple[int, ...] = ()
    for kind in (0, 1):
        if avoidable(machines, (*expected, kind), replicas):
            expected += (kind,)
    assert placement.avoids == expected
    for owner, holder in enumerate(placement.holders):
        assert holder[0] == owner
        assert len(set(holder)) == replicas
        assert apart(machines, placement.avoids, holder)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), min_size=2, max_size=8))
def test_crossing_kinds_and_short_memory_with_two_replicas(rows: list[tuple[int, int, int]]) -> None:
    """Hall's condition: any owners together have hosts apart from them with room enough."""
    machines = [Machine((f"feed-{f}", f"switch-{s}"), BUFFERS * (room + 1.0)) for f, s, room in rows]

    def possible(kinds: tuple[int, ...]) -> bool:
        count = len(rows)
        near = [
            [h for h in range(count) if h != owner and apart(machines, kinds, (owner, h))]
            for owner in range(count)
        ]
        for chosen in range(1 << count):
            owners = [i for i in range(count) if chosen >> i & 1]
            hosts = {h for owner in owners for h in near[owner]}
            if sum(min(rows[h][2], count - 1) for h in hosts) < len(owners):
                return False
        return True

    if not possible(()):
        with pytest.raises(InvalidInput, match="do not fit"):
            place(machines, 2, 1.0)
        return
    placement = place(machines, 2, 1.0)
    expected: tuple[int, ...] = ()
    for kind in (0, 1):
        if possible((*expected, kind)):
            expected += (kind,)
    assert placement.avoids == expected
    assert all(h <= room for h, (_, _, room) in zip(placement.hosted(), rows, strict=True))
    assert all(apart(machines, placement.avoids, holder) for holder in placement.holders)


def test_gemini_avoids_the_power_domains_of_a_cluster() -> None:
    """Racks of four; a switch has 3 racks, a feed 4, so that they cross."""
    description = large(
        48, machines_per_rack="4", racks_per_switch="3", racks_per_power_domain="4", host='"4 TiB"'
    )
    gemini = parse_policy("gemini=3", description).tiers[0]
    assert isinstance(gemini, Gemini)
    assert gemini.placement.avoids == (0, 1, 2)
    for holder in gemini.placement.holders:
        for size in (4, 12, 16):
            assert len({host // size for host in holder}) == 3
    for scope in ("rack", "switch", "power"):
        for component in range(description.components(scope)):
            assert gemini.recovers(lost_by(description, scope, component, "machine"))


def test_machines_with_less_memory_host_less() -> None:
    less = describe_with_less_memory(first=0, last=7)
    gemini = parse_policy("gemini", less).tiers[0]
    assert isinstance(gemini, Gemini)
    hosted = gemini.placement.hosted()
    assert hosted[:8] == [0] * 8
    assert sum(hosted[8:]) == 16
    assert gemini.host_memory_bytes_of(0) < gemini.host_memory_bytes_of(15) == gemini.host_memory_bytes
    with pytest.raises(
        InvalidInput, match=r"'checkfreq' needs 417 GiB of host memory on machine 3: memory\.different gives"
    ):
        parse_policy("checkfreq", describe_with_less_memory(first=3, last=3, host="300 GiB"))


def describe_with_less_memory(first: int, last: int, host: str = "1 TiB") -> Description:
    """Sixteen machines of 4 TiB, where a checkpoint with its two buffers takes 834 GiB; some have less."""
    plain = cluster_text(
        failure("down", "machine", 0.01, "machine"), machines="16", data="64", host='"4 TiB"'
    )
    different = f'[[memory.different]]\nmachines = [{first}, {last}]\nhost = "{host}"\n\n[bandwidth]'
    return parse_description(plain.replace("[bandwidth]", different), "the test's text")


@given(st.lists(st.integers(0, 6), min_size=2, max_size=10), st.integers(2, 3))
def test_no_machine_gets_more_than_its_memory(rooms: list[int], replicas: int) -> None:
    """It is placed whenever there is any way to, and refused when there is none."""
    size = 5.0
    machines = [
        Machine((f"rack-{i}",), BUFFERS * size * (room + 1)) for i, room in enumerate(rooms)
    ]  # itself and `room` others
    count = len(rooms)
    if replicas > count:
        return
    if _hall_fails(rooms, replicas):
        with pytest.raises(InvalidInput, match="do not fit"):
            place(machines, replicas, size)
        return
    placement = place(machines, replicas, size)
    assert all(hosted <= room for hosted, room in zip(placement.hosted(), rooms, strict=True))
    for machine, holder in enumerate(placement.holders):
        assert holder[0] == machine
        assert len(set(holder)) == replicas


def _hall_fails(rooms: list[int], replicas: int) -> bool:
    """No placement: hosts outside some set, full, and those in it, one copy an owner each, are too few."""
    count = len(rooms)
    for chosen in range(1 << count):
        inside = [i for i in range(count) if chosen >> i & 1]
        outside = sum(min(rooms[i], count - 1) for i in range(count) if not chosen >> i & 1)
        from_inside = sum(min(replicas - 1, len(inside) - (owner in inside)) for owner in range(count))
        if outside + from_inside < (replicas - 1) * count:
            return True
    return False


def test_what_cannot_fit_a_large_cluster_is_refused_at_once() -> None:
    """It was looked for by a flow between any two of the machines."""
    machines = [Machine((f"rack-{i // 4}",), BUFFERS * 2.0) for i in range(12_500)]
    with pytest.raises(InvalidInput, match="3 replicas do not fit"):
        place(machines, 3, 1.0)
    # One has no room, the others more than enough: no flow is needed.
    uneven = [Machine((), BUFFERS * (1.0 if i == 0 else 3.0)) for i in range(3000)]
    assert place(uneven, 2, 1.0).hosted()[0] == 0


def test_unequal_memory_is_used_where_it_is() -> None:
    size = 10.0
    roomy, tight = BUFFERS * size * 4, BUFFERS * size * 1
    machines = [Machine((), roomy), Machine((), roomy), Machine((), tight), Machine((), tight)]
    placement = place(machines, 2, size)
    assert placement.strategy == "by room"
    assert placement.hosted()[2:] == [0, 0]


def test_errors_say_what_is_short() -> None:
    with pytest.raises(
        InvalidInput, match=r"2 replicas do not fit .* 2 buffers x 2 copies x 4 machines x 10 B are 160 B"
    ):
        place([Machine((), 20.0)] * 4, 2, 10.0)
    with pytest.raises(InvalidInput, match="machine 1 has 19 B of memory: its own checkpoint alone needs"):
        place([Machine((), 40.0), Machine((), 19.0)], 2, 10.0)
    with pytest.raises(InvalidInput, match="memory_bytes of machine 0 is nan"):
        place([Machine((), math.nan)], 1, 10.0)
    with pytest.raises(InvalidInput, match="replicas is 5: it must be a whole number from 1 to 4"):
        place([Machine()] * 4, 5, 1.0)
    with pytest.raises(InvalidInput, match="different numbers of failure domains"):
        place([Machine(("a",)), Machine()], 1, 1.0)
