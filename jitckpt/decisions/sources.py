"""Where each rank gets its state from after a failure, and which step that is: one policy for all sources.

A pure function of what is whole somewhere. All ranks go on from one step, and from copies of one timeline:
what a start of the job has made is never mixed with what another has made again, even of the same step.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from jitckpt.decisions.redundancy import under

SHOWN_RANKS = 8


class Kind(IntEnum):
    """Kinds of sources, the nearest first.

    Devices are none: what is decided here is what a start goes on from, and by then the processes have ended
    whose memory a device had. What a live replica's device has comes as the files that it saved just in time;
    where processes live on (transparent mode) devices are read by decisions/recovery.py.
    """

    OWN_MEMORY = 0
    PEER_MEMORY = 1
    PARITY = 2
    PARTS = 3
    FILES = 4


# Bytes per second, as far as nobody has measured them: only their order matters.
RATES: Mapping[Kind, float] = {
    Kind.OWN_MEMORY: 1e10,
    Kind.PEER_MEMORY: 1e9,
    Kind.PARITY: 1e9,
    Kind.PARTS: 1e9,
    Kind.FILES: 2e8,
}


@dataclass(frozen=True)
class Parity:
    """The XOR of a cell of each other member's shard (redundancy.py) of a step, in a host's memory.

    group: the members' ranks; NOBODY for one without. place: which member the parity is. copies: of each
    shard on other members, of which the parity has no cell.
    """

    group: tuple[int, ...]
    place: int
    step: int
    timeline: str = ""
    host: int = 0
    bytes: int = 0
    copies: int = 0


NOBODY = -1


@dataclass(frozen=True)
class PartOfShard:
    """Chunks of a rank's shard of a step, from the first on, of so many that it has; at a host.

    of: tells the shard from others of that step. in_directory: they are not in the host's memory.
    """

    rank: int
    step: int
    timeline: str
    host: int
    first: int
    count: int
    chunks: int
    of: str
    bytes: int = 0
    in_directory: bool = False


@dataclass(frozen=True)
class Source:
    """A copy, whole as far as is known, of all that a rank needs of a step.

    timeline: of which start's minibatches it is; "" for files, which tell only their job. host: who has it.
    made_of: what it has to be decoded from.
    """

    rank: int
    step: int
    kind: Kind
    timeline: str = ""
    host: int = 0
    bytes: int = 0
    made_of: tuple["Piece", ...] = ()


Piece = Source | Parity | PartOfShard


@dataclass(frozen=True)
class SourcePlan:
    """What all ranks go on from: a source for each, by rank; and why, as a sentence.

    seconds: that it takes by the rates of the slowest link.
    """

    step: int
    timeline: str
    sources: Mapping[int, Source]
    seconds: float
    reason: str


def decide(
    ranks: Collection[int],
    sources: Iterable[Source],
    failed: Collection[Piece] = (),
    rates: Mapping[Kind, float] = RATES,
) -> SourcePlan | None:
    """Return the newest step of which every rank has a source; of equal ones the one that is had soonest.

    failed: sources whose check has failed; they are not taken again. None if there is no such step.
    """
    out = frozenset(failed)
    by_group: dict[tuple[int, str], dict[int, list[Source]]] = defaultdict(lambda: defaultdict(list))
    for source in sources:
        if source not in out and not out.intersection(source.made_of):
            by_group[source.step, source.timeline][source.rank].append(source)
    needed = sorted(ranks)
    whole = [group for group, found in by_group.items() if all(rank in found for rank in needed)]
    if not needed or not whole:
        return None
    newest = max(step for step, _ in whole)
    found = [
        (seconds, timeline, chosen)
        for step, timeline in sorted(whole)
        if step == newest
        for seconds, chosen in [_cheapest(needed, by_group[step, timeline], rates)]
    ]
    # Of equal ones what is in memory, which is read sooner than files.
    seconds, timeline, chosen = min(found, key=lambda one: (one[0], _farthest(one[2]), one[1]))
    lost: dict[int, Mapping[int, object]] = {}
    for (step, _), group in sorted(by_group.items()):
        if step > newest and len(group) > len(lost.get(step, ())):
            lost[step] = group
    return SourcePlan(newest, timeline, chosen, seconds, _reason(newest, chosen, needed, lost, out))


def _cheapest(
    ranks: Sequence[int], found: Mapping[int, Sequence[Source]], rates: Mapping[Kind, float]
) -> tuple[float, dict[int, Source]]:
    """Return for each rank its nearest source; of several hosts the one that has least to send so far."""
    busy: dict[tuple[Kind, int], float] = defaultdict(float)  # seconds, by what gives them
    chosen: dict[int, Source] = {}
    for rank in ranks:
        nearest = min(source.kind for source in found[rank])
        alike = [source for source in found[rank] if source.kind == nearest]
        best = min(alike, key=lambda one: (busy[one.kind, one.host] + one.bytes / rates[one.kind], one.host))
        busy[best.kind, best.host] += best.bytes / rates[best.kind]
        chosen[rank] = best
    return max(busy.values()), chosen


def shares(chunks: int, holders: int) -> list[range]:
    """Return which chunks of a shard each of so many holders sends: as equally many as can be, none empty."""
    parts = [range(chunks * one // holders, chunks * (one + 1) // holders) for one in range(holders)]
    return [part for part in parts if part]


def _farthest(chosen: Mapping[int, Source]) -> Kind:
    return max(source.kind for source in chosen.values())


def _reason(
    step: int,
    chosen: Mapping[int, Source],
    ranks: Sequence[int],
    lost: Mapping[int, Mapping[int, object]],
    failed: Collection[Piece],
) -> str:
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank, source in chosen.items():
        by_place[_place(source)].append(rank)
    parts = [f"{listed(of)} from {place}" for place, of in sorted(by_place.items())]
    text = f"all go on from step {step}: {'; '.join(parts)}"
    for newer in sorted(lost, reverse=True):
        missing = [rank for rank in ranks if rank not in lost[newer]]
        what = f"of {listed(missing)} nothing of it is left" if missing else "its copies are of two timelines"
        text += f". Step {newer} is not whole: {what}"
    damaged = sorted({(one.step, _whose(one), _place(one)) for one in failed if one.step >= step})
    for of_step, whose, place in damaged[:SHOWN_RANKS]:
        text += f". Step {of_step} {whose} in {place} has failed its check"
    return text


def _whose(one: Piece) -> str:
    if isinstance(one, Parity):
        others = [one.group[place] for place in under(len(one.group), one.place, one.copies)]
        return f"of the parity of {listed([rank for rank in others if rank != NOBODY])}"
    return f"of rank {one.rank}"


def _place(source: Piece) -> str:
    if isinstance(source, Source) and source.kind in _PLACES:
        return _PLACES[source.kind]
    if isinstance(source, PartOfShard) and source.in_directory:
        return f"a directory of host {source.host}"
    return f"the memory of host {source.host}"


_PLACES: Mapping[Kind, str] = {
    Kind.OWN_MEMORY: "their own host's memory",
    Kind.PARITY: "parity in other hosts' memory",
    Kind.PARTS: "parts on several hosts",
    Kind.FILES: "files",
}


def listed(ranks: Sequence[int]) -> str:
    """Return ranks in words."""
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN_RANKS]))}{more}"


def confirmed(of_ranks: Iterable[Collection[int]]) -> int:
    """Return the newest step that all of these have; 0 if there is none."""
    everywhere: set[int] | None = None
    for steps in of_ranks:
        everywhere = set(steps) if everywhere is None else everywhere & set(steps)
    return max(everywhere or (), default=0)
