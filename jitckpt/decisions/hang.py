"""Who waits for whom: what the ranks' answers say of a collective that does not end. Pure.

A rank that has not arrived keeps the others waiting, and may have a good reason (it compiles, evaluates,
saves, waits for its data): it is a straggler. Where all have arrived and nothing moves, or wait for each
other in a circle, or the rank that is awaited does not answer, it is a failure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jitckpt.wire.protocol import InFlight, Progress

Groups = Mapping[frozenset[int], Collection[str]]


@dataclass(frozen=True)
class Waiting:
    """The oldest unfinished operation of one of a rank's streams, and who has not arrived at it."""

    rank: int
    operation: str
    communicator: str
    ranks: tuple[int, ...]  # of the communicator, as far as they have answered
    size: int  # of the communicator
    sequence: int
    bytes: int
    seconds: float
    late: tuple[int, ...]
    dimension: str = ""  # what the training calls the communicator, such as `tensor`

    def __str__(self) -> str:
        have = "has" if len(self.late) == 1 else "have"
        late = f"{named(self.late)} {have} not arrived" if self.late else "all have arrived"
        members = f"{self.size} ranks" if len(self.ranks) < self.size else named(self.ranks)
        members += f" along {self.dimension}" if self.dimension else ""
        return (
            f"rank {self.rank} has waited {self.seconds:.1f} s in {self.operation} number {self.sequence} "
            f"({_size(self.bytes)}) of {members}, where {late}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """Every rank's waits; who is late: awaited by others, in no collective; who has not answered."""

    waits: tuple[Waiting, ...]
    late: tuple[int, ...]
    silent: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """How long the longest wait has been."""
        return max((waiting.seconds for waiting in self.waits), default=0.0)

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The late ranks that live and answer; none if somebody late does not."""
        return () if set(self.late) & set(self.silent) else self.late

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that are late, or that nobody waits for yet, and do not answer."""
        return tuple(rank for rank in self.silent if rank in self.late or not self.waits)

    def __str__(self) -> str:
        longest = max(self.waits, key=lambda waiting: waiting.seconds, default=None)
        if longest is None:
            return _does_not_answer(self.silent) if self.silent else "nothing is awaited"
        if set(self.silent) & set(self.late):
            return f"{longest}; {_does_not_answer(self.silent)}"
        if self.late:
            return str(longest)
        if stuck := [waiting for waiting in self.waits if not waiting.late]:
            return str(max(stuck, key=lambda waiting: waiting.seconds))
        return f"{longest}; all ranks wait for each other in a circle"


@dataclass
class _Place:
    """A rank on one communicator."""

    rank: int  # of the job
    sequence: int
    sends: dict[int, int] | None  # by peer; None: too many to be told
    receives: dict[int, int] | None


def diagnose(
    answers: Mapping[int, Progress],
    silent: Collection[int],
    absent: Collection[int] = (),
    *,
    patience: float = 0.0,
    groups: Groups | None = None,
) -> Diagnosis:
    """Return who waits for whom, from the answers of the ranks and the list of those that gave none.

    absent: ranks that live but can't be asked yet, or no more. A silent or absent rank counts as late
    wherever it may be the one that has not arrived. patience: waits of fewer seconds are left out. groups:
    the ranks of the training's process groups, and what it calls them.
    """
    places: dict[str, dict[int, _Place]] = {}
    sizes: dict[str, int] = {}
    idle: dict[str, set[int]] = {}  # have the communicator and have enqueued nothing on it yet
    for rank, answer in answers.items():
        for one in answer.communicators:
            if one["ranks"] == 0:
                idle.setdefault(one["communicator"], set()).add(rank)
                continue
            place = _Place(rank, one["sequence"], _by_peer(one["sends"]), _by_peer(one["receives"]))
            places.setdefault(one["communicator"], {})[one["rank"]] = place
            sizes[one["communicator"]] = one["ranks"]
    waits = []
    for rank, answer in sorted(answers.items()):
        for entry in answer.collectives:
            if entry["seconds"] < patience:
                continue
            members = places.get(entry["communicator"], {})
            size = sizes.get(entry["communicator"], 0)
            resting = idle.get(entry["communicator"], set())
            known = frozenset([*(place.rank for place in members.values()), *resting])
            unknown = {*silent, *absent} if len(known) < size else set()
            late = _late(rank, entry, members, resting) | unknown
            waits.append(
                Waiting(
                    rank=rank,
                    operation=entry["operation"],
                    communicator=entry["communicator"],
                    ranks=tuple(sorted(known)),
                    size=size,
                    sequence=entry["sequence"],
                    bytes=entry["bytes"],
                    seconds=entry["seconds"],
                    late=tuple(sorted(late)),
                    dimension=_dimension(known, size, answers.keys() - known, groups or {}),
                )
            )
    # One that is in a collective itself keeps nobody waiting by what it does on the host, even if all others
    # have arrived there, or are through: as after a broadcast, which its sender leaves first.
    waiting = {wait.rank for wait in waits}
    awaited = {rank for wait in waits for rank in wait.late}
    return Diagnosis(tuple(waits), tuple(sorted(awaited - waiting)), tuple(sorted(silent)))


def _dimension(known: frozenset[int], size: int, others: Collection[int], groups: Groups) -> str:
    """What the training calls a communicator of so many ranks; "" if that can't be told.

    known: its ranks, as far as they have answered. others: ranks that have answered and do not know it.
    """
    fits = [ranks for ranks in groups if len(ranks) == size and known <= ranks]
    likely = [ranks for ranks in fits if not ranks.intersection(others)] or fits
    return " or ".join(sorted(groups[likely[0]])) if len(likely) == 1 else ""


def _late(rank: int, entry: InFlight, members: Mapping[int, _Place], idle: set[int]) -> set[int]:
    """The ranks of the job that have not yet enqueued their part of this rank's operation.

    idle: those that have enqueued nothing on the communicator, and so have not told their place on it.
    """
    if not entry["exchanges"]:
        return idle | {place.rank for place in members.values() if place.sequence < entry["sequence"]}
    own = next((number for number, place in members.items() if place.rank == rank), None)
    late = set()
    for is_send, peer, number in entry["exchanges"]:
        other = members.get(peer)
        if other is None:
            late |= idle
            continue
        counts = other.receives if is_send else other.sends
        if counts is not None and own is not None and counts.get(own, 0) < number:
            late.add(other.rank)
    return late


def _by_peer(pairs: Sequence[tuple[int, int]] | None) -> dict[int, int] | None:
    return None if pairs is None else {peer: count for peer, count in pairs}


def named(ranks: Collection[int]) -> str:
    """Return ranks in words, such as `ranks 0 to 3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low} to {high}" for low, high in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts) or 'unknown'}"


def _does_not_answer(ranks: Collection[int]) -> str:
    return f"{named(ranks)} {'does' if len(ranks) == 1 else 'do'} not answer"


def _size(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"


def report(
    diagnosis: Diagnosis,
    stacks: Mapping[int, str],
    driver: Mapping[str, Sequence[str]] | None = None,
    nccl: str = "",
) -> str:
    """Return the whole story for a file.

    stacks: the Python stacks of late ranks, where they could be had. driver: what NVIDIA's driver has told
    the kernel's log of each host. nccl: what NCCL itself says of the job.
    """
    lines = [f"{diagnosis}.", "", "Who waits for whom:"]
    longest_first = sorted(diagnosis.waits, key=lambda waiting: -waiting.seconds)
    lines += [f"  {waiting}" for waiting in longest_first] or ["  nobody"]
    if diagnosis.silent:
        lines.append(f"Without an answer: {named(diagnosis.silent)}.")
    for rank, text in sorted(stacks.items()):
        lines += ["", f"Python stacks of rank {rank}:", text.rstrip() or "  it did not write them"]
    for host, said in sorted((driver or {}).items()):
        if said:
            lines += ["", f"NVIDIA's driver on {host}:", *(f"  {line}" for line in said)]
    if nccl:
        lines += ["", "NCCL itself (its RAS service) says:", nccl.rstrip()]
    return "\n".join(lines) + "\n"
