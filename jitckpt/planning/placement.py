"""Which machines keep copies of which machine's checkpoint in memory (GEMINI, Algorithm 1, and beyond).

Beyond the paper: copies never share a failure domain (rack, switch, power feed) when that is possible, and
machines may have unequal memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jitckpt.planning.check import InvalidInput, number, whole
from jitckpt.planning.max_flow import FlowNetwork
from jitckpt.planning.units import show_bytes

BUFFERS = 2  # of each checkpoint: the last whole one and the one being written


@dataclass(frozen=True)
class Placement:
    """holders[i]: the machines that hold machine i's checkpoint, itself first, i from 0."""

    strategy: str  # group, ring, mixed, shifted ring or assigned
    holders: tuple[tuple[int, ...], ...]
    safe_level: int | None = (
        None  # index into the machines' domains; None: no two copies on one machine, no more
    )

    def hosted(self) -> list[int]:
        """How many other machines' checkpoints each machine keeps."""
        counts = Counter(host for holder in self.holders for host in holder[1:])
        return [counts[machine] for machine in range(len(self.holders))]


@dataclass(frozen=True)
class Machine:
    """A machine to place on. domains from the largest to the smallest, e.g. ("feed-1", "switch-2", "rack-7").

    A domain's full name is the path to it, so "rack-7" of one switch is not "rack-7" of another.
    """

    domains: tuple[str, ...] = ()
    memory_bytes: float = float("inf")


def mixed_placement(machines: int, replicas: int) -> Placement:
    """Algorithm 1: groups; where m does not divide N, the last N - m (floor(N / m) - 1) form a ring."""
    _check(machines, replicas)
    groups, rest = divmod(machines, replicas)
    in_groups = machines if rest == 0 else replicas * (groups - 1)
    holders = [
        tuple((i // replicas) * replicas + (i + j) % replicas for j in range(replicas))
        for i in range(in_groups)
    ]
    ring = machines - in_groups
    holders += [tuple(in_groups + (i + j) % ring for j in range(replicas)) for i in range(ring)]
    return Placement("group" if rest == 0 else "mixed", tuple(holders))


def ring_placement(machines: int, replicas: int) -> Placement:
    """Each machine's copies go to the next replicas - 1 machines."""
    _check(machines, replicas)
    return Placement(
        "ring", tuple(tuple((i + j) % machines for j in range(replicas)) for i in range(machines))
    )


def place(machines: Sequence[Machine], replicas: int, checkpoint_bytes: float) -> Placement:
    """The safest placement that fits.

    Tries to keep all copies of a checkpoint in different domains of the largest level, then of the next, and
    so on down to machines. On each level groups first (they survive most simultaneous losses), then a ring
    with a stride that leaves the domain, then any assignment there is, by maximum flow. Raises InvalidInput
    where not even different machines have the memory.
    """
    count = len(machines)
    _check(count, replicas)
    number("checkpoint_bytes", checkpoint_bytes)
    levels = {len(machine.domains) for machine in machines}
    if len(levels) != 1:
        raise InvalidInput(
            "machines name different numbers of failure domains: each needs one of every level"
        )
    room = [_room(index, machine, checkpoint_bytes) for index, machine in enumerate(machines)]
    depth = levels.pop()
    for level in [*range(depth), None]:
        domains = [
            machine.domains[: level + 1] if level is not None else (str(i),)
            for i, machine in enumerate(machines)
        ]
        order = sorted(range(count), key=lambda i: (machines[i].domains, i))
        attempts: tuple[Callable[[], Placement | None], ...] = (
            partial(_dealt, order, replicas),
            partial(_shifted_ring, order, domains, replicas),
            partial(_assigned, domains, room, replicas),
        )
        for attempt in attempts:
            placement = attempt()
            if placement is None or any(h > r for h, r in zip(placement.hosted(), room, strict=True)):
                continue
            if all(len({domains[host] for host in holder}) == replicas for holder in placement.holders):
                return Placement(placement.strategy, placement.holders, level)
    needed = BUFFERS * replicas * checkpoint_bytes * count
    have = sum(machine.memory_bytes for machine in machines)
    raise InvalidInput(
        f"{replicas} replicas do not fit the machines' memory: {BUFFERS} buffers x {replicas} copies x "
        f"{count} machines x {show_bytes(checkpoint_bytes)} are {show_bytes(needed)}, there is "
        f"{show_bytes(have)} in all; give more memory, fewer replicas or a smaller checkpoint"
    )


def _check(machines: int, replicas: int) -> None:
    whole("machines", machines, low=1)
    whole("replicas", replicas, low=1, high=machines)


def _room(index: int, machine: Machine, checkpoint_bytes: float) -> float:
    """How many checkpoints of others fit beside the machine's own."""
    if machine.memory_bytes != machine.memory_bytes or machine.memory_bytes < 0:
        raise InvalidInput(
            f"memory_bytes of machine {index} is {machine.memory_bytes!r}: it must be at least 0"
        )
    if checkpoint_bytes == 0:
        return float("inf")
    fits = machine.memory_bytes / (BUFFERS * checkpoint_bytes)
    room = (fits if fits == float("inf") else int(fits)) - 1
    if room < 0:
        raise InvalidInput(
            f"machine {index} has {show_bytes(machine.memory_bytes)} of memory: its own checkpoint "
            f"alone needs {BUFFERS} buffers of {show_bytes(checkpoint_bytes)}"
        )
    return room


def _dealt(order: list[int], replicas: int) -> Placement:
    """Algorithm 1 over the machines dealt out like cards.

    `order` keeps every domain in one piece; neighbours in it go to different groups, so that a domain with no
    more machines than there are groups has at most one in each.
    """
    plain = mixed_placement(len(order), replicas)
    groups = len(order) // replicas
    seats = list(range(len(order)))  # seat s of the plain placement is taken by the machine at place seats[s]
    if len(order) % replicas == 0:
        seats = [column * groups + row for row in range(groups) for column in range(replicas)]
    else:
        # The ring takes an even sample of the order, the groups the rest.
        size = len(order) - replicas * (groups - 1)
        sampled = [i * len(order) // size for i in range(size)]
        taken = set(sampled)
        rest = [place for place in seats if place not in taken]
        seats = [rest[c * (groups - 1) + r] for r in range(groups - 1) for c in range(replicas)] + sampled
    machine_of = [order[seat] for seat in seats]
    holders: list[tuple[int, ...]] = [()] * len(order)
    for seat, holder in enumerate(plain.holders):
        holders[machine_of[seat]] = tuple(machine_of[host] for host in holder)
    return Placement(plain.strategy, tuple(holders))


def _shifted_ring(order: list[int], domains: Sequence[tuple[str, ...]], replicas: int) -> Placement | None:
    """A ring whose step is the size of the largest domain: safe whenever that many steps fit the ring."""
    step = max(Counter(domains).values())
    count = len(order)
    if step * replicas > count:
        return None
    holders: list[tuple[int, ...]] = [()] * count
    for seat, machine in enumerate(order):
        holders[machine] = tuple(order[(seat + j * step) % count] for j in range(replicas))
    return Placement("shifted ring", tuple(holders))


def _assigned(domains: Sequence[tuple[str, ...]], room: Sequence[float], replicas: int) -> Placement | None:
    """Any placement with all copies in different domains and none over its room; None if there is none.

    Machines of one domain are alike as owners, so the flow runs between domains: from A to B at most one copy
    an owner in A, out of A (replicas - 1) an owner, into B what its machines have room for.
    """
    names = sorted(set(domains))
    members = {name: [i for i, domain in enumerate(domains) if domain == name] for name in names}
    wanted = replicas - 1
    network = FlowNetwork(2 * len(names) + 2)
    source, sink = 2 * len(names), 2 * len(names) + 1
    between: dict[tuple[int, int], int] = {}
    for a, name in enumerate(names):
        network.add(source, a, wanted * len(members[name]))
        for b in range(len(names)):
            if a != b:
                between[a, b] = network.add(a, len(names) + b, len(members[name]))
        # No host ever keeps more than one copy of each other machine.
        network.add(len(names) + a, sink, sum(min(room[i], len(domains) - 1) for i in members[name]))
    if network.maximum(source, sink) < wanted * len(domains):
        return None
    seats = {
        name: [host for host in members[name] for _ in range(int(min(room[host], len(domains) - 1)))]
        for name in names
    }
    holders: list[list[int]] = [[i] for i in range(len(domains))]
    for a, name in enumerate(names):
        turn = 0  # owners of a domain take turns, so that none gets two copies from the same other domain
        for b, host_name in enumerate(names):
            for _ in range(round(network.flow(between[a, b])) if a != b else 0):
                holders[members[name][turn % len(members[name])]].append(seats[host_name].pop())
                turn += 1
    return Placement("assigned", tuple(tuple(holder) for holder in holders))
