import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.planning.check import InvalidInput
from jitckpt.planning.placement import BUFFERS, Machine, mixed_placement, place, ring_placement


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
    assert (placement.safe_level == 0) == (not shared)
    for machine, holder in enumerate(placement.holders):
        assert holder[0] == machine
        assert len(set(holder)) == replicas


def test_the_largest_domain_that_can_be_avoided_is() -> None:
    machines = [Machine((f"feed-{i // 8}", f"switch-{i // 4}", f"rack-{i // 2}")) for i in range(16)]
    assert place(machines, 2, 1.0).safe_level == 0  # two power feeds
    three = place(machines, 3, 1.0)
    assert three.safe_level == 1  # three copies cannot avoid two feeds, but four switches
    for holder in three.holders:
        assert len({machines[host].domains[:2] for host in holder}) == 3


def test_groups_are_kept_when_they_are_safe() -> None:
    placement = place(in_racks(4, 4, 4, 4), 2, 1.0)
    assert placement.strategy == "group"
    assert Counter(frozenset(holder) for holder in placement.holders).most_common()[-1][1] == 2
    assert place(in_racks(3, 3, 1), 2, 1.0).strategy == "shifted ring"


def test_domains_of_one_name_in_different_places_are_different() -> None:
    machines = [Machine(("feed-0", "rack-0")), Machine(("feed-1", "rack-0"))]
    assert place(machines, 2, 1.0).safe_level == 0


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


def test_unequal_memory_is_used_where_it_is() -> None:
    size = 10.0
    roomy, tight = BUFFERS * size * 4, BUFFERS * size * 1
    machines = [Machine((), roomy), Machine((), roomy), Machine((), tight), Machine((), tight)]
    placement = place(machines, 2, size)
    assert placement.strategy == "assigned"
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
