"""Where the parts of copies go that no host has room for as a whole (COLLAB's flush schedule); pure.

Each host tells what it has to send, and what it has room for: in memory that nobody needs otherwise, and in a
directory. All goes over all links at once, so that the longest takes the least time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jitckpt.decisions import flush
from jitckpt.decisions.flush import MeasuredLink
from jitckpt.wire.agents import SentPart

FEW = 24  # hosts for which the least time is found; for more it is the paper's greedy way
USUAL_RATE = 1e9  # bytes per second of a link that nobody has measured


@dataclass(frozen=True)
class HostRoom:
    """Of one host. needs: bytes of each rank whose copy is to be spread. memory, directory: bytes it takes.

    beside: bytes that a part of each of these ranks' states has beside its chunks, all together. rates: bytes
    per second to other hosts, as far as they are measured; into_directory: to its own one.
    """

    needs: Mapping[int, int] = field(default_factory=dict)
    memory: int = 0
    directory: int = 0
    beside: int = 0
    rates: Mapping[int, float] = field(default_factory=dict)
    into_directory: float = USUAL_RATE


@dataclass(frozen=True)
class Spread:
    """parts: of each rank all its chunks, in order. seconds: that the longest link needs. lacking: ranks."""

    parts: tuple[SentPart, ...]
    seconds: float
    lacking: tuple[int, ...]


def spread(rooms: Mapping[int, HostRoom], chunk: int) -> Spread:
    """Return where each chunk of so many bytes goes; of ranks for which there is too little room none."""
    needs = {
        (host, rank): -(-size // chunk) for host, one in rooms.items() for rank, size in one.needs.items()
    }
    lacking: list[int] = []
    while True:
        seconds, sent, stuck = _sent(rooms, needs, chunk)
        if not stuck:
            break
        largest = max((key for key in needs if key[0] in stuck), key=lambda key: (needs[key], key))
        del needs[largest]
        lacking.append(largest[1])
    parts = [part for host in sorted(rooms) for part in _cut(host, needs, sent)]
    return Spread(tuple(parts), seconds, tuple(sorted(lacking)))


_Sent = list[
    tuple[int, int, bool, int]
]  # from which host to which, whether to its directory, how many chunks


def _sent(
    rooms: Mapping[int, HostRoom], needs: Mapping[tuple[int, int], int], chunk: int
) -> tuple[float, _Sent, set[int]]:
    """Return how long it takes and what goes where, or which hosts have more than there is room for."""
    hosts = sorted(rooms)
    at = {host: number for number, host in enumerate(hosts)}
    count = len(hosts)
    supply, room = [0] * (3 * count), [0] * (3 * count)  # the hosts, their memory, and their directories
    for (host, _), size in needs.items():
        supply[at[host]] += size
    beside = sum(one.beside for one in rooms.values())  # a host may get a part of each
    for host in hosts:
        room[count + at[host]] = max(0, rooms[host].memory - beside) // chunk
        room[2 * count + at[host]] = max(0, rooms[host].directory - beside) // chunk
    known = sorted(rate for one in rooms.values() for rate in one.rates.values() if rate > 0)
    usual = known[len(known) // 2] if known else USUAL_RATE
    links = []
    for one in (host for host in hosts if supply[at[host]]):
        for other in (host for host in hosts if host != one):
            rate = rooms[one].rates.get(other) or usual
            slow = min(rate, max(1.0, rooms[other].into_directory))
            for target, speed in ((count + at[other], rate), (2 * count + at[other], slow)):
                if room[target]:
                    links.append(MeasuredLink(at[one], target, speed / chunk))
    if count > FEW:
        rates = {(link.source, link.target): link.bytes_per_second for link in links}
        remainder = {v: size for v, size in enumerate(supply) if size}
        amounts, left = flush.greedy(remainder, dict(enumerate(room)), rates)
        flows = [(MeasuredLink(*ends, rates[ends]), int(size)) for ends, size in amounts.items()]
        stuck = {hosts[v] for v in left}
    else:
        try:
            least, _ = flush.soonest(supply, room, links)
        except flush.StuckError as error:
            return 0.0, [], {hosts[v] for v in error.vertices}
        flows, stuck = flush.in_units(supply, room, links, least), set()
    seconds = max((size / link.bytes_per_second for link, size in flows), default=0.0)
    return (
        seconds,
        [
            (hosts[link.source], hosts[link.target % count], link.target >= 2 * count, size)
            for link, size in flows
        ],
        stuck,
    )


def _cut(host: int, needs: Mapping[tuple[int, int], int], sent: _Sent) -> list[SentPart]:
    """Return which chunks of a host's ranks go where, one rank after the other."""
    places = [[to, in_directory, size] for source, to, in_directory, size in sorted(sent) if source == host]
    parts = []
    for (_, rank), size in sorted(item for item in needs.items() if item[0][0] == host):
        first = 0
        while first < size:
            to, in_directory, left = places[0]
            count = min(left, size - first)
            parts.append(SentPart(rank, int(to), bool(in_directory), first, count))
            first += count
            places[0][2] -= count
            if not places[0][2]:
                places.pop(0)
    return parts
