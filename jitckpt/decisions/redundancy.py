"""Who of a group keeps which cells of its members' shards, and what is still there when members are lost.

REFT's copies (ARC) and XOR parity with rotating cells (AEC). The planner counts with it, and the memory tier
keeps real bytes by it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput, whole

LEAST_GROUP = 3  # with two members the parity would be a copy


@dataclass(frozen=True)
class CellLayout:
    """Who of a sharding group keeps what, by cell. A cell is (shard, number)."""

    members: int
    cells_per_shard: int
    kept: tuple[frozenset[tuple[int, int]], ...]  # by member
    parity: tuple[
        tuple[int, frozenset[tuple[int, int]]], ...
    ]  # (member that keeps it, cells it is the XOR of)


def layout(members: int, copies: int = 0, parity: bool = False) -> CellLayout:
    """Member d keeps shard d and those of the `copies` members before it; parity as in AEC.

    The parity that member q keeps has one cell of every member whose shard q does not keep.
    """
    losses = copies + (1 if parity else 0)
    protectable(members, losses)
    cells = members - 1 - copies if parity else 1
    kept = [
        frozenset(
            (d, cell)
            for d in range(members)
            if member in keepers(members, d, copies)
            for cell in range(cells)
        )
        for member in range(members)
    ]
    beneath: dict[int, set[tuple[int, int]]] = {member: set() for member in range(members)}
    if parity:
        for d in range(members):
            for cell, member in enumerate(parities_of(members, d, copies)):
                beneath[member].add((d, cell))
    return CellLayout(members, cells, tuple(kept), tuple((q, frozenset(c)) for q, c in beneath.items() if c))


def keepers(members: int, shard: int, copies: int) -> list[int]:
    """Return the members that keep a shard as a whole, its own first."""
    return [(shard + step) % members for step in range(copies + 1)]


def parities_of(members: int, shard: int, copies: int) -> list[int]:
    """Return the members under whose parity a shard has a cell each, in the order of the cells."""
    whole_at = keepers(members, shard, copies)
    return [member for member in range(members) if member not in whole_at]


def under(members: int, place: int, copies: int) -> list[int]:
    """Return the shards of which a member's parity has a cell: those that it does not keep."""
    return [shard for shard in range(members) if place not in keepers(members, shard, copies)]


def protectable(members: int, losses: int) -> int:
    """Return how many members the group has. Raises InvalidInput if not even one would be left."""
    if whole("members", members, low=1) <= losses:
        raise InvalidInput(
            f"members is {members}: to survive {losses} lost of a sharding group it must be at "
            f"least {losses + 1}"
        )
    return members


def survives(plan: CellLayout, lost: Iterable[int]) -> bool:
    """Whether every cell can still be read or decoded when the `lost` members are gone."""
    there = set(range(plan.members)) - set(lost)
    return recovered(plan, there, there) == set(range(plan.members))


def recovered(plan: CellLayout, readable: Collection[int], parities: Collection[int]) -> set[int]:
    """Return whose shards can be read or decoded.

    readable: members of which all that they keep of shards is there; parities: members whose parity is.
    """
    have = set().union(*(plan.kept[member] for member in readable))
    equations = [cells for member, cells in plan.parity if member in parities]
    progress = True
    while progress:
        progress = False
        for cells in equations:
            missing = cells - have
            if len(missing) == 1:
                have |= missing
                progress = True
    numbers = range(plan.cells_per_shard)
    return {member for member in range(plan.members) if all((member, one) in have for one in numbers)}


def groups(hosts: int, size: int, copies: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return groups of hosts next to each other, of this size; the last one takes those that are left over.

    copies: of each shard on other members. Raises InvalidInput where parity gains nothing over copies.
    """
    least = LEAST_GROUP + copies
    if min(hosts, size) < least:
        raise InvalidInput(
            f"{_beside(copies)} needs groups of {least} hosts or more, and here "
            + (f"are {hosts}" if hosts < least else f"a group has {size}")
            + f": with {least - 1}, the parity is as long as a copy; take --memory-tier "
            + (f"peer={copies + 2}" if copies else "peer")
        )
    whole_groups = max(1, hosts // size)
    starts = [number * size for number in range(whole_groups)]
    return tuple(tuple(range(begin, end)) for begin, end in zip(starts, [*starts[1:], hosts], strict=True))


def _beside(copies: int) -> str:
    if not copies:
        return "parity"
    return f"parity beside {copies} cop{'ies' if copies > 1 else 'y'} on other hosts"


def cell(members: int, shard: int, place: int, chunks: int, copies: int = 0) -> range:
    """Return the chunks of a member's shard, of so many, that are under the parity of another member."""
    over = parities_of(members, shard, copies)
    number, length = over.index(place), -(-chunks // len(over))
    return range(min(chunks, number * length), min(chunks, (number + 1) * length))
