"""When a fast tier is full: who sends how much to whose spare memory, so that all are done soonest (COLLAB).

`baseline`, `greedy` and `min_time_max_flow` are the paper's; `exact` is the true optimum (native/algorithms),
`exact_reference` the same in Python. All transfers run at once, so the blocking time is the longest
bytes / bandwidth of any link.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from jitckpt.decisions import flush as decided
from jitckpt.decisions.check import InvalidInput, number, positive
from jitckpt.planning.topology import GPU, STORE, SWITCH, Topology


@dataclass(frozen=True)
class Flush:
    """One save: what each GPU (in the topology's order) has to put where, and what it has free."""

    topology: Topology
    checkpoint_bytes: tuple[float, ...]
    free_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("checkpoint_bytes", "free_bytes"):
            sizes = getattr(self, name)
            if len(sizes) != len(self.topology.gpus):
                raise InvalidInput(
                    f"{name} has {len(sizes)} entries: the topology has {len(self.topology.gpus)} GPUs"
                )
            for index, size in enumerate(sizes):
                number(f"{name} of GPU {index}", size)

    @property
    def remainder_bytes(self) -> list[float]:
        """By GPU: what does not fit its own memory."""
        return [max(0.0, c - f) for c, f in zip(self.checkpoint_bytes, self.free_bytes, strict=True)]

    @property
    def spare_bytes(self) -> list[float]:
        """By GPU: what it could take for others."""
        return [max(0.0, f - c) for c, f in zip(self.checkpoint_bytes, self.free_bytes, strict=True)]


class Transfer(NamedTuple):  # a thousand of them have to be made within a millisecond
    """Bytes over one link of the topology."""

    source: int
    target: int
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class FlushSchedule:
    blocking_seconds: float
    transfers: tuple[Transfer, ...]


def exact(flush: Flush) -> FlushSchedule:
    """The least blocking time there is, and transfers that reach it."""
    from jitckpt import _algorithms

    topology = flush.topology
    try:
        seconds, link_bytes, _ = topology.compiled.fastest(*supply_and_room(flush))
    except _algorithms.Unreachable as error:
        raise _stuck(flush, error.vertices) from None
    used = np.flatnonzero(link_bytes)
    sizes = link_bytes[used]
    source, target, rate = (column[used] for column in topology.link_columns)
    columns = (source.tolist(), target.tolist(), sizes.tolist(), (sizes / rate).tolist())
    # As Transfer(*row), without a call of Python for each: that would take longer than the schedule.
    make = partial(tuple.__new__, Transfer)
    return FlushSchedule(seconds, tuple(map(make, zip(*columns, strict=True))))


def supply_and_room(flush: Flush) -> tuple[list[float], list[float]]:
    """By vertex of the topology: bytes that must leave it, bytes that it can take."""
    supply = [0.0] * len(flush.topology.vertices)
    room = [vertex.capacity_bytes if vertex.kind == STORE else 0.0 for vertex in flush.topology.vertices]
    for gpu, over, spare in zip(flush.topology.gpus, flush.remainder_bytes, flush.spare_bytes, strict=True):
        supply[gpu], room[gpu] = over, spare
    return supply, room


def _stuck(flush: Flush, vertices: Sequence[int]) -> InvalidInput:
    names = ", ".join(flush.topology.vertices[v].name for v in vertices)
    return InvalidInput(
        f"bytes of {names} have nowhere to go: no link with bandwidth leads from there to enough spare "
        "memory or to a store with room"
    )


def exact_reference(flush: Flush) -> FlushSchedule:
    """As `exact`, in Python, as the memory tier does it (decisions/flush.py)."""
    topology = flush.topology
    links = [decided.MeasuredLink(link.source, link.target, link.bytes_per_second) for link in topology.links]
    relays = [v for v, vertex in enumerate(topology.vertices) if vertex.kind != GPU]
    try:
        seconds, sent = decided.soonest(*supply_and_room(flush), links, relays)
    except decided.StuckError as error:
        raise _stuck(flush, error.vertices) from None
    return FlushSchedule(
        seconds,
        tuple(Transfer(link.source, link.target, size, size / link.bytes_per_second) for link, size in sent),
    )


def _direct(flush: Flush) -> tuple[dict[int, float], dict[int, float], int]:
    """What the paper's algorithms know: remainders and spares by vertex, and one host."""
    topology = flush.topology
    stores = [v for v, vertex in enumerate(topology.vertices) if vertex.kind == STORE]
    if len(stores) != 1 or any(vertex.kind == SWITCH for vertex in topology.vertices):
        raise InvalidInput(
            "the paper's algorithms know direct links and one host only: use exact for this topology"
        )
    for gpu, over in zip(topology.gpus, flush.remainder_bytes, strict=True):
        if over > 0 and not topology.bandwidth.get((gpu, stores[0])):
            raise InvalidInput(
                f"{topology.vertices[gpu].name} has no link to the host: use exact for this topology"
            )
    remainder = dict(zip(topology.gpus, flush.remainder_bytes, strict=True))
    return remainder, dict(zip(topology.gpus, flush.spare_bytes, strict=True)), stores[0]


def _schedule(topology: Topology, amounts: dict[tuple[int, int], float]) -> FlushSchedule:
    transfers = tuple(
        Transfer(*ends, size, size / topology.bandwidth[ends]) for ends, size in amounts.items() if size > 0
    )
    return FlushSchedule(max((t.seconds for t in transfers), default=0.0), transfers)


def baseline(flush: Flush) -> FlushSchedule:
    """Every remainder to the host."""
    remainder, _, host = _direct(flush)
    return _schedule(flush.topology, {(gpu, host): size for gpu, size in remainder.items()})


def greedy(flush: Flush) -> FlushSchedule:
    """COLLAB, Algorithm 1, as the memory tier does it; what is left goes to the host."""
    remainder, spare, host = _direct(flush)
    rates = {ends: rate for ends, rate in flush.topology.bandwidth.items() if ends[1] != host}
    amounts, left = decided.greedy(remainder, spare, rates)
    return _schedule(flush.topology, amounts | {(gpu, host): size for gpu, size in left.items()})


def min_time_max_flow(flush: Flush, unit_bytes: float = 1e6) -> FlushSchedule:
    """COLLAB, Algorithm 2: one unit at a time along the path whose slowest link ends soonest.

    Sizes are cut to whole units (remainders up, spares down), so it is up to a unit off the optimum.
    """
    positive("unit_bytes", unit_bytes)
    remainder, spare, host = _direct(flush)
    over = {gpu: -int(-size // unit_bytes) for gpu, size in remainder.items() if size > 0}
    room = {gpu: int(size // unit_bytes) for gpu, size in spare.items()}
    count = len(flush.topology.vertices)
    source, sink = count, count + 1
    capacity: dict[int, dict[int, int]] = {v: {} for v in range(count + 2)}
    cost: dict[tuple[int, int], float] = {}

    def add(u: int, v: int, units: int, seconds: float) -> None:
        capacity[u][v], capacity[v][u] = units, 0
        cost[u, v], cost[v, u] = seconds, -seconds

    for gpu, units in over.items():
        add(source, gpu, units, 0.0)
    for (u, v), rate in flush.topology.bandwidth.items():
        if u in over and rate > 0 and (v == host or room[v] > 0):
            add(u, v, over[u] if v == host else min(over[u], room[v]), unit_bytes / rate)
    for gpu, units in room.items():
        if units > 0:
            add(gpu, sink, units, 0.0)
    add(host, sink, sum(over.values()), 0.0)

    while True:
        seconds = dict.fromkeys(range(count + 2), float("inf"))
        parent: dict[int, int] = {}
        seconds[source] = 0.0
        queue = deque([source])
        while queue:
            u = queue.popleft()
            for v, left in capacity[u].items():
                if left <= 0:
                    continue
                step = cost[u, v]
                sent = capacity[v][u] if step > 0 else left
                after = max(seconds[u], abs(sent * step) + step)
                if after < seconds[v]:
                    seconds[v] = after
                    parent[v] = u
                    queue.append(v)
        if seconds[sink] == float("inf"):
            break
        v = sink
        while v != source:
            u = parent[v]
            capacity[u][v] -= 1
            capacity[v][u] += 1
            v = u
    amounts = {
        (u, v): capacity[v][u] * unit_bytes
        for (u, v), seconds in cost.items()
        if seconds > 0 and v not in (source, sink) and capacity[v][u] > 0
    }
    return _schedule(flush.topology, amounts)
