import itertools
import math
from fractions import Fraction

import pytest

from jitckpt.planning.check import InvalidInput
from jitckpt.planning.counting import (
    corollary_1,
    recovery_probability,
    surviving_losses,
    surviving_losses_of_groups,
    surviving_losses_of_ring,
)
from jitckpt.planning.placement import mixed_placement, ring_placement


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
    with pytest.raises(InvalidInput, match="too tangled"):
        surviving_losses(list(itertools.pairwise(_far_apart(80))), 80)


def _far_apart(machines: int) -> list[int]:
    """An order of machines whose neighbours lie half of them apart."""
    return [(i // 2) + (machines // 2) * (i % 2) for i in range(machines)]
