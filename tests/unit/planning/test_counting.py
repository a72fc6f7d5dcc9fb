import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.placement import BUFFERS, Machine, mixed_placement, place, ring_placement
from jitckpt.planning.counting import (
    corollary_1,
    recovery_probability,
    surviving_losses,
    surviving_losses_of_groups,
    surviving_losses_of_ring,
)


def brute_force(holders: tuple[tuple[int, ...], ...], machines: int) -> list[int]:
    """Every set of lost machines, one by one."""
    masks = {sum(1 << machine for machine in holder) for holder in holders}
    counts = [0] * (machines + 1)
    for lost in range(1 << machines):
        if all(lost & mask != mask for mask in masks):
            counts[lost.bit_count()] += 1
    return counts


@pytest.mark.parametrize("machines", [*range(1, 13), 16])
def test_every_way_of_counting_agrees_with_brute_force(machines: int) -> None:
    for replicas in range(1, machines + 1) if machines < 16 else (2, 3, 5):
        mixed, ring = mixed_placement(machines, replicas), ring_placement(machines, replicas)
        expected_mixed, expected_ring = (
            brute_force(mixed.holders, machines),
            brute_force(ring.holders, machines),
        )
        assert surviving_losses(mixed.holders, machines) == expected_mixed
        assert surviving_losses(ring.holders, machines) == expected_ring
        for lost in range(machines + 1):
            sets = math.comb(machines, lost)
            assert recovery_probability(machines, replicas, lost) == Fraction(expected_mixed[lost], sets)
            assert recovery_probability(machines, replicas, lost, "ring") == Fraction(
                expected_ring[lost], sets
            )


def test_numbers_of_the_paper() -> None:
    assert float(recovery_probability(16, 2, 2)) == pytest.approx(0.933, abs=5e-4)
    assert recovery_probability(16, 2, 3) == Fraction(4, 5)
    assert recovery_probability(16, 2, 3, "ring") == Fraction(
        352, 560
    )  # the paper says 25 % less than groups


def test_limits() -> None:
    for machines, replicas in ((1, 1), (7, 2), (8, 4), (100, 3)):
        assert recovery_probability(machines, replicas, 0) == 1
        assert recovery_probability(machines, replicas, machines) == 0
        assert all(recovery_probability(machines, replicas, lost) == 1 for lost in range(replicas))
    assert recovery_probability(9, 9, 8) == 1  # m = N: one survivor has everything
    assert recovery_probability(9, 9, 9) == 0
    assert recovery_probability(9, 1, 1) == 0  # m = 1: nobody has a copy


def test_corollary_1_is_exact_below_two_groups_and_a_bound_beyond() -> None:
    for lost in range(6):
        assert corollary_1(12, 3, lost) == recovery_probability(12, 3, lost)
    for lost in range(6, 13):
        assert corollary_1(12, 3, lost) <= recovery_probability(12, 3, lost)
    assert corollary_1(12, 3, 7) < recovery_probability(12, 3, 7)


def test_groups_lose_least_and_more_losses_are_never_better() -> None:
    for machines, replicas in ((12, 2), (12, 3), (12, 4)):
        chances = [recovery_probability(machines, replicas, lost) for lost in range(machines + 1)]
        assert chances == sorted(chances, reverse=True)
        for lost in range(machines + 1):
            assert chances[lost] >= recovery_probability(machines, replicas, lost, "ring")


@pytest.mark.parametrize(("replicas", "lost"), [(2, 100), (2, 5000), (3, 101), (7, 6000), (5000, 9999)])
def test_ten_thousand_machines(replicas: int, lost: int) -> None:
    chance = recovery_probability(10_000, replicas, lost)
    assert 0 <= chance <= 1
    if replicas == 2 and lost == 100:
        # One machine after the other, none the partner of one before: product of (N - 2 i) / (N - i).
        product = math.prod(Fraction(10_000 - 2 * i, 10_000 - i) for i in range(lost))
        assert chance == product


def test_a_large_ring_by_both_ways() -> None:
    counts = surviving_losses(ring_placement(300, 3).holders, 300)
    for lost in (0, 3, 40, 150, 201, 300):
        assert counts[lost] == surviving_losses_of_ring(300, 3, lost)
    assert sum(surviving_losses_of_groups(20, 4, k) for k in range(21)) == (2**4 - 1) ** 5


def test_any_placement_counts_what_shares_no_machine_apart() -> None:
    holders = [(0, 3), (1, 4, 6), (2, 5), (7,)]
    assert surviving_losses(holders, 9) == brute_force(tuple(holders), 9)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput, match="replicas is 17: it must be a whole number from 1 to 16"):
        recovery_probability(16, 17, 2)
    with pytest.raises(InvalidInput, match="lost is 17"):
        recovery_probability(16, 2, 17)
    with pytest.raises(InvalidInput, match="need a multiple"):
        recovery_probability(16, 3, 2, "group")
    with pytest.raises(InvalidInput, match="strategy is 'star'"):
        recovery_probability(16, 2, 2, "star")
    with pytest.raises(InvalidInput, match="outside 0 to 2"):
        surviving_losses([(0, 3)], 3)
    with pytest.raises(InvalidInput, match="most_lost is 4"):
        surviving_losses([(0, 2)], 3, most_lost=4)


def by_masks(holders: list[tuple[int, ...]], machines: int) -> list[int]:
    """Every set of lost machines, all at once."""
    lost = np.arange(1 << machines, dtype=np.uint32)
    fine = np.ones(len(lost), bool)
    for holder in holders:
        mask = np.uint32(sum(1 << machine for machine in set(holder)))
        fine &= (lost & mask) != mask
    return [int(n) for n in np.bincount(np.bitwise_count(lost[fine]), minlength=machines + 1)]


@settings(max_examples=80)
@given(st.data())
def test_any_overlap_agrees_with_brute_force(data: st.DataObject) -> None:
    machines = data.draw(st.integers(1, 9))
    holder = st.sets(st.integers(0, machines - 1), min_size=1, max_size=5)
    holders = [tuple(found) for found in data.draw(st.lists(holder, max_size=10))]
    expected = by_masks(holders, machines)
    assert surviving_losses(holders, machines) == expected
    most = data.draw(st.integers(0, machines))
    assert surviving_losses(holders, machines, most) == expected[: most + 1]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 16])
def test_sixteen_machines_tangled_at_random_agree_with_brute_force(replicas: int) -> None:
    generator = random.Random(replicas)
    for checkpoints in (4, 16, 40):
        holders = [tuple(generator.sample(range(16), replicas)) for _ in range(checkpoints)]
        expected = by_masks(holders, 16)
        assert surviving_losses(holders, 16) == expected
        for lost in (0, 1, 2, 7, 16):
            assert surviving_losses(holders, 16, lost) == expected[: lost + 1]


def test_what_overlaps_like_a_tree_a_star_or_a_ring_is_counted_whatever_its_order() -> None:
    generator = random.Random(1)
    names = generator.sample(range(300), 300)
    ring = [tuple(names[i] for i in holder) for holder in ring_placement(300, 3).holders]
    assert surviving_losses(ring, 300) == surviving_losses(ring_placement(300, 3).holders, 300)
    # A star: everybody's second copy on machine 0. Either it survives, or everybody else does.
    star = [(i, 0) for i in range(1, 200)]
    assert surviving_losses(star, 200) == [math.comb(199, k) + (1 if k == 1 else 0) for k in range(200)] + [0]
    # A tree, against the recursion for the sets of its machines without two neighbours.
    parents = [0, *(generator.randrange(i) for i in range(1, 400))]
    tree = [(i, parents[i]) for i in range(1, 400)]
    without, within = [[1] for _ in parents], [[0, 1] for _ in parents]
    for child in range(399, 0, -1):
        parent = parents[child]
        either = [a + b for a, b in itertools.zip_longest(without[child], within[child], fillvalue=0)]
        without[parent] = times(without[parent], either)
        within[parent] = times(within[parent], without[child])
    total = [a + b for a, b in itertools.zip_longest(without[0], within[0], fillvalue=0)]
    assert surviving_losses(tree, 400) == total + [0] * (401 - len(total))


def times(a: list[int], b: list[int]) -> list[int]:
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return product


def test_ten_thousand_machines_of_unequal_memory_are_counted() -> None:
    """As placed with racks and switches to avoid: pairs that hang together like trees and rings."""
    machines = [
        Machine((f"switch-{i // 48}", f"rack-{i // 4}"), BUFFERS * (1.0 + i % 4)) for i in range(10_000)
    ]
    holders = place(machines, 2, 1.0).holders
    pairs = len({frozenset(holder) for holder in holders})
    counts = surviving_losses(holders, 10_000, 2)
    assert counts == [1, 10_000, math.comb(10_000, 2) - pairs]
    assert surviving_losses(holders[:1], 10_000, 3)[3] == math.comb(10_000, 3) - 9_998


def test_what_is_too_tangled_is_refused_but_for_few_losses() -> None:
    generator = random.Random(1)
    holders = [tuple(generator.sample(range(80), 3)) for _ in range(80)]
    with pytest.raises(InvalidInput, match=r"too tangled to count the ways to lose up to 7\d"):
        surviving_losses(holders, 80)
    distinct = len({frozenset(holder) for holder in holders})
    assert surviving_losses(holders, 80, 3) == [1, 80, math.comb(80, 2), math.comb(80, 3) - distinct]
