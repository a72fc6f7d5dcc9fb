"""Counting the losses that a placement survives whose checkpoints overlap anyhow.

Machines are put together into blocks, two at a time. A block knows, for each set of its open checkpoints
(some holders lie outside) that have a survivor inside, in how many ways 0, 1, 2, ... of its machines are
lost. A checkpoint whose holders are all inside must have a survivor, and is forgotten. So what overlaps like
a tree, a ring or a band takes few terms; what is tangled takes many, and is refused when they get too many.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput

_MOST_TERMS = 1 << 16
_MOST_PRODUCTS = 1 << 22  # of terms, for one merger


@dataclass(frozen=True)
class _Block:
    open: frozenset[int]  # checkpoints with holders inside and outside
    # By which of the open ones have a survivor inside (a bit each): a polynomial in the number of machines
    # lost, as one whole number, its coefficients a fixed number of bits apart. Python multiplies those faster
    # than any loop of ours.
    terms: dict[int, int]


class Overlapping:
    """Machines tied together by the checkpoints that they hold."""

    def __init__(
        self, machines: Sequence[int], checkpoints: Sequence[frozenset[int]], most_lost: int
    ) -> None:
        """checkpoints: the holders of each."""
        self._machines, self._checkpoints = len(machines), len(checkpoints)
        self._most_lost = min(most_lost, len(machines))
        # No count is larger, so that coefficients do not touch.
        self._bits = math.comb(len(machines), min(self._most_lost, len(machines) // 2)).bit_length()
        self._mask = (1 << self._bits * (self._most_lost + 1)) - 1
        self._blocks: dict[int, _Block] = {}
        self._blocks_of: list[set[int]] = [set() for _ in checkpoints]
        held: dict[int, list[int]] = {machine: [] for machine in machines}
        for checkpoint, holders in enumerate(checkpoints):
            for machine in holders:
                held[machine].append(checkpoint)
        leaves = []
        for same, size in Counter(tuple(found) for found in held.values()).items():  # they are alike
            lost = 1 << self._bits * size
            some_survive = sum(math.comb(size, k) << self._bits * k for k in range(size))
            terms = {_bits_of(same): some_survive, 0: lost} if same else {0: some_survive + lost}
            leaves.append(_Block(frozenset(same), terms))
        for number, leaf in enumerate(leaves):
            for checkpoint in leaf.open:
                self._blocks_of[checkpoint].add(number)
        for number, leaf in enumerate(leaves):
            self._enter(number, leaf)
        self._made = len(leaves)

    def counts(self) -> list[int]:
        """Entry k, up to most_lost: the sets of k lost machines that leave each checkpoint a holder."""
        self._put_what_hangs_on_to_where_it_hangs()
        # What is left goes round in circles: one block grows along them, by what opens least.
        front = min(self._blocks, key=lambda number: (len(self._blocks[number].open), number))
        while len(self._blocks) > 1:
            front = self._merge(front, self._closest_to(front))
        total = self._blocks[front].terms.get(0, 0)
        coefficient = (1 << self._bits) - 1
        return [total >> self._bits * k & coefficient for k in range(self._most_lost + 1)]

    def _put_what_hangs_on_to_where_it_hangs(self) -> None:
        """A block whose open checkpoints another one has too opens nothing there: trees go leaf by leaf."""
        queue = deque(self._blocks)
        while queue and len(self._blocks) > 1:
            number = queue.popleft()
            if number not in self._blocks:
                continue
            mine = self._blocks[number].open
            bearers = set.intersection(*(self._blocks_of[checkpoint] for checkpoint in mine)) - {number}
            if bearers:
                made = self._merge(number, min(bearers))
                queue.append(made)
                queue.extend(sorted(self._near(made)))

    def _near(self, number: int) -> set[int]:
        return set().union(*(self._blocks_of[c] for c in self._blocks[number].open)) - {number}

    def _closest_to(self, front: int) -> int:
        mine = self._blocks[front].open

        def opens(number: int) -> tuple[int, int, int]:
            other = self._blocks[number].open
            closing = sum(self._blocks_of[checkpoint] == {front, number} for checkpoint in mine & other)
            return len(other - mine) - closing, len(self._blocks[number].terms), number

        return min(self._near(front), key=opens)

    def _enter(self, number: int, block: _Block) -> None:
        """Keep a block; of the checkpoints that no other has, keep what leaves them a survivor."""
        closed = frozenset(c for c in block.open if self._blocks_of[c] == {number})
        must = _bits_of(closed)
        terms: dict[int, int] = {}
        for key, value in block.terms.items():
            if key & must == must and value & self._mask:
                terms[key ^ must] = value & self._mask
        self._blocks[number] = _Block(block.open - closed, terms)

    def _merge(self, one: int, two: int) -> int:
        """Two blocks become one; returns its number."""
        a, b = self._blocks.pop(one), self._blocks.pop(two)
        if len(a.terms) * len(b.terms) > _MOST_PRODUCTS:
            raise self._too_tangled()
        terms: dict[int, int] = {}
        for other_key, other_value in b.terms.items():
            # One machine lost is a power of two, and a shift much faster than a product.
            shift = other_value.bit_length() - 1 if other_value & (other_value - 1) == 0 else None
            for key, value in a.terms.items():
                product = (value * other_value if shift is None else value << shift) & self._mask
                if product:
                    terms[key | other_key] = terms.get(key | other_key, 0) + product
        if len(terms) > _MOST_TERMS:
            raise self._too_tangled()
        number = self._made
        self._made += 1
        for checkpoint in a.open | b.open:
            self._blocks_of[checkpoint] -= {one, two}
            self._blocks_of[checkpoint].add(number)
        self._enter(number, _Block(a.open | b.open, terms))
        return number

    def _too_tangled(self) -> InvalidInput:
        return InvalidInput(
            f"a placement that ties {self._machines} machines together by {self._checkpoints} checkpoints is "
            f"too tangled to count the ways to lose up to {self._most_lost}: it takes more than {_MOST_TERMS}"
            " terms; ask for fewer lost, or place in groups or a ring"
        )


def _bits_of(checkpoints: Iterable[int]) -> int:
    return sum(1 << checkpoint for checkpoint in checkpoints)
