"""Who sends how much to whose spare room, so that all are done soonest (COLLAB); pure.

All links are used at once, so the time is the longest bytes / bandwidth of any link. `soonest` is the least
there is, by maximum flows; `greedy` is the paper's Algorithm 1, for problems too large for that.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jitckpt.decisions.max_flow import FlowNetwork

_CRUMB_SHARE = 1e-13  # of all bytes; what rounding leaves on a full edge


class MeasuredLink(NamedTuple):
    """One direction."""

    source: int
    target: int
    bytes_per_second: float


class StuckError(Exception):
    """What these vertices have to send has nowhere to go."""

    def __init__(self, vertices: Sequence[int]) -> None:
        super().__init__(f"vertices {list(vertices)}")
        self.vertices = vertices


def soonest(
    supply: Sequence[float],
    room: Sequence[float],
    links: Iterable[MeasuredLink],
    relays: Collection[int] = (),
) -> tuple[float, list[tuple[MeasuredLink, float]]]:
    """Return the least time, and what goes over each link that is used.

    supply, room: by vertex, what must leave it, and what it can take. relays: vertices that pass on what
    comes. Raises StuckError. The time is raised until the maximum flow carries everything.
    """
    demand = sum(supply)
    if demand == 0:
        return 0.0, []
    count = len(supply)
    source, sink = count, count + 1
    network = FlowNetwork(count + 2)
    edges = [
        (network.add(link.source, link.target, 0.0), link)
        for link in links
        if (supply[link.source] > 0 or link.source in relays)
        and (room[link.target] > 0 or link.target in relays)
    ]
    for v in range(count):
        if supply[v] > 0:
            network.add(source, v, supply[v])
        if room[v] > 0:
            network.add(v, sink, min(room[v], 2 * demand))
    seconds, missing, crumb = 0.0, demand, demand * _CRUMB_SHARE
    while True:
        missing -= network.maximum(source, sink, crumb)
        if missing <= crumb * (len(edges) + 2 * count):
            break
        near = network.source_side(source, crumb)
        rate = sum(link.bytes_per_second for _, link in edges if near[link.source] and not near[link.target])
        fixed = sum(supply[v] for v in range(count) if not near[v])
        fixed += sum(min(room[v], 2 * demand) for v in range(count) if near[v])
        if rate == 0:
            raise StuckError([v for v in range(count) if supply[v] > 0 and near[v]])
        later = (demand - fixed) / rate
        if later <= seconds:
            break
        for edge, link in edges:
            network.enlarge(edge, (later - seconds) * link.bytes_per_second)
        seconds = later
    return seconds, [(link, network.flow(edge)) for edge, link in edges if network.flow(edge) > 0]


def greedy(
    remainder: Mapping[int, float], spare: Mapping[int, float], rates: Mapping[tuple[int, int], float]
) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
    """Return what goes from whom to whom, and what is left, by sender; rates: of the links, by their ends.

    The largest remainder first, always over the fastest link to spare room. As printed, line 14 forgets the
    remainder before line 15 records it; put right here.
    """
    spare, left_over = dict(spare), {}
    fastest_first: dict[int, list[int]] = {}
    for (source, target), rate in sorted(rates.items(), key=lambda link: -link[1]):
        if rate > 0:
            fastest_first.setdefault(source, []).append(target)
    amounts: dict[tuple[int, int], float] = {}
    for sender in sorted(remainder, key=lambda one: -remainder[one]):
        left = remainder[sender]
        for target in fastest_first.get(sender, []):
            size = min(left, spare.get(target, 0.0))
            if size > 0:
                amounts[sender, target] = size
                left -= size
                spare[target] -= size
        if left > 0:
            left_over[sender] = left
    return amounts, left_over


def in_units(
    supply: Sequence[int], room: Sequence[int], links: Sequence[MeasuredLink], seconds: float
) -> list[tuple[MeasuredLink, int]]:
    """Return whole units for each link that is used, in the least time in which whole ones can go.

    Supply, room and bandwidths are in units. seconds: the least time for parts of units. Where all capacities
    are whole, so is the maximum flow; and with one more for each link than `seconds` have room for, there is
    one that carries everything.
    """
    used = [link for link in links if supply[link.source] and room[link.target]]
    times = sorted({seconds, *((_units(link, seconds) + 1) / link.bytes_per_second for link in used)})
    first, last = 0, len(times) - 1
    while first < last:  # the least of these times that is enough
        middle = (first + last) // 2
        if sum(size for _, size in _whole(supply, room, used, times[middle])) == sum(supply):
            last = middle
        else:
            first = middle + 1
    return _whole(supply, room, used, times[first])


def _units(link: MeasuredLink, seconds: float) -> int:
    return int(seconds * link.bytes_per_second * (1 + 1e-9))


def _whole(
    supply: Sequence[int], room: Sequence[int], links: Sequence[MeasuredLink], seconds: float
) -> list[tuple[MeasuredLink, int]]:
    """Return as many units for each link as can go in so many seconds."""
    count = len(supply)
    source, sink = count, count + 1
    network = FlowNetwork(count + 2)
    edges = [(network.add(link.source, link.target, _units(link, seconds)), link) for link in links]
    for v in range(count):
        if supply[v]:
            network.add(source, v, supply[v])
        if room[v]:
            network.add(v, sink, room[v])
    network.maximum(source, sink)
    return [(link, int(network.flow(edge))) for edge, link in edges if network.flow(edge) > 0]
