"""How likely all checkpoints survive in memory when k of N machines are lost at once: counted, never sampled.

A checkpoint is lost when every machine that holds it is. Counts are whole numbers of any size, so a
probability is exact until its one final division.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from jitckpt.decisions.check import InvalidInput, whole
from jitckpt.planning.overlaps import Overlapping


def surviving_losses_of_groups(machines: int, replicas: int, lost: int) -> int:
    """Sets of `lost` machines that leave someone in each of the machines / replicas groups.

    Inclusion and exclusion over the groups lost whole: sum over j of (-1)^j C(N/m, j) C(N - j m, k - j m).
    """
    groups, rest = divmod(machines, replicas)
    if rest:
        raise InvalidInput(f"machines is {machines}: groups of {replicas} need a multiple of it")
    if not 0 <= lost <= machines:
        return 0
    total = 0
    choose_groups = 1
    remaining, chosen = machines, lost
    choose_machines = math.comb(machines, lost)
    for j in range(min(groups, lost // replicas) + 1):
        total += _sign(j) * choose_groups * choose_machines
        choose_groups = choose_groups * (groups - j) // (j + 1)
        # C(n - m, k - m) from C(n, k): one machine at a time, C(n - 1, k - 1) = C(n, k) k / n
        for _ in range(replicas):
            if chosen == 0:
                return total
            choose_machines = choose_machines * chosen // remaining
            remaining, chosen = remaining - 1, chosen - 1
    return total


def _sign(j: int) -> int:
    return -1 if j % 2 else 1


def surviving_losses_of_ring(machines: int, replicas: int, lost: int) -> int:
    """Sets of `lost` machines of a ring with no `replicas` neighbours in a row among them.

    Each of the z survivors is followed by a run of fewer than m lost ones:
    N / z times the coefficient of x^k in (1 + x + ... + x^(m-1))^z.
    """
    survivors = machines - lost
    if not 0 <= lost <= machines or (survivors == 0 and lost > 0):
        return 0
    ways = 0
    for j in range(min(survivors, lost // replicas) + 1):
        rest = lost - j * replicas
        ways += _sign(j) * math.comb(survivors, j) * math.comb(survivors + rest - 1, rest)
    return ways * machines // survivors


def recovery_probability(machines: int, replicas: int, lost: int, strategy: str = "mixed") -> Fraction:
    """The chance that memory still holds all checkpoints after `lost` of `machines` are lost at once.

    strategy: "group" (replicas must divide machines), "ring", or "mixed" (GEMINI, Algorithm 1: groups, and a
    ring of the last N - m (floor(N / m) - 1) machines where m does not divide N).
    """
    whole("machines", machines, low=1)
    whole("replicas", replicas, low=1, high=machines)
    whole("lost", lost, low=0, high=machines)
    if strategy == "ring":
        count = surviving_losses_of_ring(machines, replicas, lost)
    elif strategy == "group" or (strategy == "mixed" and machines % replicas == 0):
        count = surviving_losses_of_groups(machines, replicas, lost)
    elif strategy == "mixed":
        ring = machines - replicas * (machines // replicas - 1)
        count = sum(
            surviving_losses_of_ring(ring, replicas, in_ring)
            * surviving_losses_of_groups(machines - ring, replicas, lost - in_ring)
            for in_ring in range(max(0, lost - (machines - ring)), min(ring, lost) + 1)
        )
    else:
        raise InvalidInput(f"strategy is {strategy!r}: it must be group, ring or mixed")
    return Fraction(count, math.comb(machines, lost))


def corollary_1(machines: int, replicas: int, lost: int) -> Fraction:
    """GEMINI's own bound: exact for lost < 2 replicas, below the truth from there on."""
    if lost < replicas:
        return Fraction(1)
    lost_sets = Fraction(machines, replicas) * math.comb(machines - replicas, lost - replicas)
    return max(Fraction(0), 1 - lost_sets / math.comb(machines, lost))


def surviving_losses(
    holders: Sequence[Iterable[int]], machines: int, most_lost: int | None = None
) -> list[int]:
    """For any placement: entry k counts the sets of k lost machines that leave each checkpoint a holder.

    holders[i]: the machines that hold checkpoint i. Counts up to k = `most_lost` (else up to all machines),
    which is faster and can be done for more tangled placements. Machines that share no checkpoint are counted
    apart and multiplied; within such a part: `jitckpt.planning.overlaps`. Raises InvalidInput when a part is
    too tangled to count.
    """
    whole("machines", machines, low=1)
    highest = machines if most_lost is None else whole("most_lost", most_lost, high=machines)
    sets = {frozenset(holder) for holder in holders}
    if any(not s or min(s) < 0 or max(s) >= machines for s in sets):
        raise InvalidInput(f"holders name machines outside 0 to {machines - 1}, or a checkpoint has none")
    parts = [(part, inside) for part, inside in _parts(sets, machines) if inside]
    free = machines - sum(len(part) for part, _ in parts)  # hold nothing: any of them may be lost
    counts = [1]
    for k in range(min(free, highest)):
        counts.append(counts[-1] * (free - k) // (k + 1))
    counted = [Overlapping(part, inside, highest).counts() for part, inside in parts]
    found = _product([counts, *counted], highest)
    return found + [0] * (highest + 1 - len(found))


def _parts(sets: set[frozenset[int]], machines: int) -> list[tuple[list[int], list[frozenset[int]]]]:
    root = list(range(machines))

    def find(machine: int) -> int:
        while root[machine] != machine:
            root[machine] = root[root[machine]]
            machine = root[machine]
        return machine

    for s in sets:
        first, *others = s
        for other in others:
            root[find(other)] = find(first)
    part_machines: dict[int, list[int]] = {}
    part_sets: dict[int, list[frozenset[int]]] = {}
    for machine in range(machines):
        part_machines.setdefault(find(machine), []).append(machine)
    for s in sets:
        part_sets.setdefault(find(next(iter(s))), []).append(s)
    return [(part, part_sets.get(key, [])) for key, part in part_machines.items()]


def _product(polynomials: list[list[int]], highest: int) -> list[int]:
    """All polynomials multiplied, in pairs, so that equal sizes meet, up to x^highest.

    A polynomial with whole, non-negative coefficients is one big number with room enough for each; Python
    multiplies those faster than any loop of ours.
    """
    while len(polynomials) > 1:
        polynomials = [
            _multiply(polynomials[i], polynomials[i + 1])[: highest + 1]
            if i + 1 < len(polynomials)
            else polynomials[i]
            for i in range(0, len(polynomials), 2)
        ]
    return polynomials[0]


def _multiply(a: list[int], b: list[int]) -> list[int]:
    size = (max(a).bit_length() + max(b).bit_length() + min(len(a), len(b)).bit_length() + 8) // 8
    product = _pack(a, size) * _pack(b, size)
    data = product.to_bytes(size * (len(a) + len(b) - 1), "little")
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def _pack(polynomial: list[int], size: int) -> int:
    return int.from_bytes(b"".join(c.to_bytes(size, "little") for c in polynomial), "little")
