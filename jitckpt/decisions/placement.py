"""Which machines keep copies of which machine's checkpoint in memory (GEMINI, Algorithm 1, and beyond).

Beyond the paper: copies never share a failure domain (rack, switch, power feed) when that is possible, and
machines may have unequal memory.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jitckpt.decisions.check import InvalidInput, number, whole
from jitckpt.decisions.max_flow import FlowNetwork
from jitckpt.decisions.sizes import show_bytes

BUFFERS = 2  # of each checkpoint: the last whole one and the one being written


@dataclass(frozen=True)
class Placement:
    """holders[i]: the machines that hold machine i's checkpoint, itself first, i from 0."""

    strategy: str  # group, ring, mixed, shifted ring, by room or by flow
    holders: tuple[tuple[int, ...], ...]
    avoids: tuple[int, ...] = ()  # levels of the machines' domains that no two copies of a checkpoint share

    def hosted(self) -> list[int]:
        """How many other machines' checkpoints each machine keeps."""
        counts = Counter(host for holder in self.holders for host in holder[1:])
        return [counts[machine] for machine in range(len(self.holders))]


@dataclass(frozen=True)
class Machine:
    """A machine to place on. domains: one of each kind, e.g. ("feed-1", "switch-2", "rack-7").

    The kind that is most important to avoid comes first. A name is the same domain wherever it appears.
    Kinds may lie in each other (racks of a switch) or cross each other (a feed has racks of two switches).
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

    No machine gets two copies of a checkpoint. Then, kind of domain by kind, the copies also avoid sharing
    one, where that is possible together with those before. For each set of kinds: groups first (they survive
    most simultaneous losses), then a ring with a stride that leaves the domains, then any placement at all.
    Raises InvalidInput where not even different machines have the memory.

    Finds a placement whenever there is one, but in one case: three or more replicas, kinds that cross each
    other, and so little memory that who is placed first decides, or so few hosts apart that a thousand tries
    for one owner do not find them. So it is, whatever the replicas, on more than a thousand places (racks, if
    racks are what is avoided).
    """
    count = len(machines)
    _check(count, replicas)
    number("checkpoint_bytes", checkpoint_bytes)
    kinds = {len(machine.domains) for machine in machines}
    if len(kinds) != 1:
        raise InvalidInput("machines name different numbers of failure domains: each needs one of every kind")
    room = [_room(index, machine, checkpoint_bytes) for index, machine in enumerate(machines)]
    columns = [_numbered([machine.domains[kind] for machine in machines]) for kind in range(kinds.pop())]
    best: Placement | None = None
    avoids: tuple[int, ...] = ()
    if sum(min(r, count - 1) for r in room) < (replicas - 1) * count:
        raise _no_room(machines, replicas, checkpoint_bytes)
    for kind, column in enumerate(columns):
        if any(_lies_in(column, columns[other]) for other in avoids):
            avoids += (kind,)  # whoever avoids the larger avoids the smaller
        elif (better := _apart([*avoids, kind], columns, room, replicas)) is not None:
            best, avoids = better, (*avoids, kind)
    best = best or _apart([], columns, room, replicas)
    if best is None:
        raise _no_room(machines, replicas, checkpoint_bytes)
    return Placement(best.strategy, best.holders, avoids)


def _no_room(machines: Sequence[Machine], replicas: int, checkpoint_bytes: float) -> InvalidInput:
    needed = BUFFERS * replicas * checkpoint_bytes * len(machines)
    have = sum(machine.memory_bytes for machine in machines)
    return InvalidInput(
        f"{replicas} replicas do not fit the machines' memory: {BUFFERS} buffers x {replicas} copies x "
        f"{len(machines)} machines x {show_bytes(checkpoint_bytes)} are {show_bytes(needed)}, there is "
        f"{show_bytes(have)} in all; give more memory, fewer replicas or a smaller checkpoint"
    )


def _numbered(names: Sequence[str]) -> list[int]:
    """Domains by number, in the order in which they appear."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _lies_in(inner: Sequence[int], outer: Sequence[int]) -> bool:
    """Whether each inner domain has machines of one outer domain only."""
    return len(set(zip(inner, outer, strict=True))) == len(set(inner))


def _apart(
    avoided: Sequence[int], columns: Sequence[Sequence[int]], room: Sequence[float], replicas: int
) -> Placement | None:
    """A placement whose copies share no machine and no domain of the kinds `avoided`; None: none is found."""
    count = len(room)
    asked = [columns[kind] for kind in avoided] or [range(count)]
    # Who avoids the larger avoids the smaller that lie in it.
    asked = [c for i, c in enumerate(asked) if not any(_lies_in(c, other) for other in asked[:i])]
    asked = [c for i, c in enumerate(asked) if not any(_lies_in(c, other) for other in asked[i + 1 :])]
    if any(len(set(column)) < replicas for column in asked):
        return None
    order = sorted(range(count), key=lambda i: (*(column[i] for column in columns), i))
    attempts: tuple[Callable[[], Placement | None], ...] = (
        partial(_dealt, order, replicas),
        partial(_shifted_ring, order, asked, replicas),
        partial(_by_room, asked, room, replicas),
        partial(_by_flow, asked, room, replicas),
    )
    for attempt in attempts:
        placement = attempt()
        if (
            placement is not None
            and all(h <= r for h, r in zip(placement.hosted(), room, strict=True))
            and all(
                len({column[host] for host in holder}) == replicas
                for holder in placement.holders
                for column in asked
            )
        ):
            return placement
    return None


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


def _shifted_ring(order: list[int], asked: Sequence[Sequence[int]], replicas: int) -> Placement | None:
    """A ring whose step is the size of the largest domain: safe whenever that many steps fit the ring."""
    step = max(max(Counter(column).values()) for column in asked)
    count = len(order)
    if step * replicas > count:
        return None
    holders: list[tuple[int, ...]] = [()] * count
    for seat, machine in enumerate(order):
        holders[machine] = tuple(order[(seat + j * step) % count] for j in range(replicas))
    return Placement("shifted ring", tuple(holders))


def _by_room(asked: Sequence[Sequence[int]], room: Sequence[float], replicas: int) -> Placement | None:
    """Owner by owner, those with the fewest places to go to first, to the hosts that have most room left.

    Finds a placement wherever memory is ample; where it is short, most often.
    """
    count = len(room)
    left = [min(r, count - 1) for r in room]
    places = _numbered(["/".join(str(column[i]) for column in asked) for i in range(count)])
    members: list[list[tuple[float, int]]] = [[] for _ in range(max(places) + 1)]
    domains: list[tuple[int, ...]] = [()] * len(members)
    for i, place_ in enumerate(places):
        members[place_].append((-left[i], i))
        domains[place_] = tuple(column[i] for column in asked)
    for heap in members:
        heapq.heapify(heap)
    crowded = [Counter(column) for column in asked]
    owners = sorted(
        range(count), key=lambda i: -max(c[column[i]] for c, column in zip(crowded, asked, strict=True))
    )
    # All places by the room of their best host. Entries of a place that has changed since are stale.
    best = [(heap[0][0], place_) for place_, heap in enumerate(members)]
    heapq.heapify(best)
    holders: list[tuple[int, ...]] = [()] * count
    for owner in owners:
        chosen = _choose(domains[places[owner]], replicas - 1, best, members, domains)
        if chosen is None:
            return None
        hosts = []
        for place_ in chosen:
            negative_room, host = members[place_][0]
            hosts.append(host)
            heapq.heapreplace(members[place_], (negative_room + 1, host))
            heapq.heappush(best, (members[place_][0][0], place_))
        holders[owner] = (owner, *hosts)
    return Placement("by room", tuple(holders))


_MOST_TRIES = 1000  # for one owner


def _choose(
    own: tuple[int, ...],
    wanted: int,
    best: list[tuple[float, int]],
    members: Sequence[Sequence[tuple[float, int]]],
    domains: Sequence[tuple[int, ...]],
) -> list[int] | None:
    """`wanted` places, pairwise and from `own` apart in every kind, roomiest first; searched depth first."""
    looked: list[tuple[float, int]] = []  # taken from `best`, put back at the end
    tries = 0

    def entry(index: int) -> int | None:
        """The place with the index-th most room."""
        while len(looked) <= index:
            if not best:
                return None
            room, place_ = heapq.heappop(best)
            fresh = room == members[place_][0][0] and all(place_ != seen for _, seen in looked)
            if fresh and room < 0:
                looked.append((room, place_))
        return looked[index][1]

    def search(chosen: list[int], index: int) -> list[int] | None:
        nonlocal tries
        if len(chosen) == wanted:
            return chosen
        while tries < _MOST_TRIES and (place_ := entry(index)) is not None:
            tries += 1
            index += 1
            taken = [own, *(domains[c] for c in chosen)]
            if any(a == b for other in taken for a, b in zip(domains[place_], other, strict=True)):
                continue
            if (found := search([*chosen, place_], index)) is not None:
                return found
        return None

    found = search([], 0)
    for item in looked:
        heapq.heappush(best, item)
    return found


_MOST_PLACES = 1000


def _by_flow(asked: Sequence[Sequence[int]], room: Sequence[float], replicas: int) -> Placement | None:
    """By maximum flow: finds a placement if there is any, for one kind of domain or for two replicas.

    Machines of one place (one domain of each kind) are alike as owners, so the flow runs between places: from
    A to B at most one copy an owner in A, out of A (replicas - 1) an owner, into B what its machines have
    room for. With several kinds and more replicas the hosts of an owner may share a domain; the caller looks.
    """
    count = len(room)
    keys = [tuple(column[i] for column in asked) for i in range(count)]
    names = sorted(set(keys))
    if len(names) > _MOST_PLACES:
        return None  # a link between any two would take minutes
    members = {name: [i for i, key in enumerate(keys) if key == name] for name in names}
    wanted = replicas - 1
    network = FlowNetwork(2 * len(names) + 2)
    source, sink = 2 * len(names), 2 * len(names) + 1
    between: dict[tuple[int, int], int] = {}
    for a, name in enumerate(names):
        network.add(source, a, wanted * len(members[name]))
        for b, host_name in enumerate(names):
            if all(x != y for x, y in zip(name, host_name, strict=True)):
                between[a, b] = network.add(a, len(names) + b, len(members[name]))
        # No host ever keeps more than one copy of each other machine.
        network.add(len(names) + a, sink, sum(min(room[i], count - 1) for i in members[name]))
    if network.maximum(source, sink) < wanted * count:
        return None
    seats = {
        name: [host for host in members[name] for _ in range(int(min(room[host], count - 1)))]
        for name in names
    }
    holders: list[list[int]] = [[i] for i in range(count)]
    for a, name in enumerate(names):
        turn = 0  # owners of a place take turns, so that none gets two copies from the same other place
        for b, host_name in enumerate(names):
            for _ in range(round(network.flow(between[a, b])) if (a, b) in between else 0):
                holders[members[name][turn % len(members[name])]].append(seats[host_name].pop())
                turn += 1
    return Placement("by flow", tuple(tuple(holder) for holder in holders))
