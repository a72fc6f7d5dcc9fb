"""Who waits for whom: what the ranks' answers say of a collective that does not end. Pure.

A rank that has not arrived keeps the others waiting, and may have a good reason (it compiles, evaluates,
saves, waits for its data): it is a straggler. Where all have arrived and nothing moves, or wait for each
other in a circle, or the rank that is awaited does not answer, it is a failure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jitckpt.protocol import Progress


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

    def __str__(self) -> str:
        have = "has" if len(self.late) == 1 else "have"
        late = f"{named(self.late)} {have} not arrived" if self.late else "all have arrived"
        members = f"{self.size} ranks" if len(self.ranks) < self.size else named(self.ranks)
        return (
            f"rank {self.rank} has waited {self.seconds:.1f} s in {self.operation} number {self.sequence} "
            f"({_size(self.bytes)}) of {members}, where {late}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """Every rank's waits; who is late: awaited by others, waiting for nobody; who has not answered."""

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

    def __str__(self) -> str:
        longest = max(self.waits, key=lambda waiting: waiting.seconds, default=None)
        if longest is None:
            return _does_not_answer(self.silent) if self.silent else "nothing is awaited"
        if set(self.silent) & set(self.late):
            return f"{longest}; {_does_not_answer(self.silent)}"
        if self.late:
            return str(longest)
        if longest.late:
            return f"{longest}; all ranks wait for each other in a circle"
        return str(longest)


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
) -> Diagnosis:
    """Return who waits for whom, from the answers of the ranks and the list of those that gave none.

    absent: ranks that live but can't be asked yet. A silent or absent rank counts as late wherever it may be
    the one that has not arrived. patience: waits of fewer seconds are left out.
    """
    places: dict[str, dict[int, _Place]] = {}
    sizes: dict[str, int] = {}
    for rank, answer in answers.items():
        for one in answer.communicators:
            place = _Place(rank, one["sequence"], _by_peer(one["sends"]), _by_peer(one["receives"]))
            places.setdefault(one["communicator"], {})[one["rank"]] = place
            sizes[one["communicator"]] = one["ranks"]
    waits = []
    for rank, answer in sorted(answers.items()):
        for entry in answer.collectives:
            if entry["seconds"] < patience:
                continue
            members = places.get(entry["communicator"], {})
            unknown = len(members) < sizes.get(entry["communicator"], 0)
            late = _late(rank, entry, members) | ({*silent, *absent} if unknown else set())
            waits.append(
                Waiting(
                    rank=rank,
                    operation=entry["operation"],
                    communicator=entry["communicator"],
                    ranks=tuple(sorted(place.rank for place in members.values())),
                    size=sizes.get(entry["communicator"], 0),
                    sequence=entry["sequence"],
                    bytes=entry["bytes"],
                    seconds=entry["seconds"],
                    late=tuple(sorted(late)),
                )
            )
    waiting = {wait.rank for wait in waits if wait.late}
    awaited = {rank for wait in waits for rank in wait.late}
    return Diagnosis(tuple(waits), tuple(sorted(awaited - waiting)), tuple(sorted(silent)))


def _late(rank: int, entry: Mapping[str, Any], members: Mapping[int, _Place]) -> set[int]:
    """The ranks of the job that have not yet enqueued their part of this rank's operation."""
    if not entry["exchanges"]:
        return {place.rank for place in members.values() if place.sequence < entry["sequence"]}
    own = next((number for number, place in members.items() if place.rank == rank), None)
    late = set()
    for is_send, peer, number in entry["exchanges"]:
        other = members.get(peer)
        if other is None:
            continue
        counts = other.receives if is_send else other.sends
        if counts is not None and own is not None and counts.get(own, 0) < number:
            late.add(other.rank)
    return late


def _by_peer(pairs: list[list[int]] | None) -> dict[int, int] | None:
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


def report(diagnosis: Diagnosis, stacks: Mapping[int, str]) -> str:
    """Return the whole story for a file; stacks: the Python stacks of late ranks, where they could be had."""
    lines = [f"{diagnosis}.", "", "Who waits for whom:"]
    longest_first = sorted(diagnosis.waits, key=lambda waiting: -waiting.seconds)
    lines += [f"  {waiting}" for waiting in longest_first] or ["  nobody"]
    if diagnosis.silent:
        lines.append(f"Without an answer: {named(diagnosis.silent)}.")
    for rank, text in sorted(stacks.items()):
        lines += ["", f"Python stacks of rank {rank}:", text.rstrip() or "  it did not write them"]
    return "\n".join(lines) + "\n"
