"""The order in which all ranks make their communicators anew, so that none waits in a circle."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitckpt.errors import JitckptError
from jitckpt.wire.communicators import Membership


class CommunicatorError(JitckptError):
    """The ranks disagree on the communicators that there are; the text names the first disagreement."""


@dataclass(frozen=True)
class Communicator:
    """A communicator as each of its members knows it, alike on all of them.

    key: its identity in the job, such as a digest of its unique id. members: the job's ranks, in the order of
    their ranks in it. parent: the communicator that it was split from, "" if none; split: which of the
    parent's splits that was, counted from 0.
    """

    key: str
    members: tuple[int, ...]
    parent: str = ""
    split: int = 0

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"A communicator can't have the members {self.members}.")


@dataclass(frozen=True)
class Creation:
    """One collective call: all `callers` make it, and each is in one of `made` or in none of them.

    With a parent it is a split of it, which all of the parent's members call, whatever they get.
    """

    callers: tuple[int, ...]
    made: tuple[Communicator, ...]
    parent: str = ""


def joined(places: Mapping[int, Iterable[Membership]]) -> dict[int, tuple[Communicator, ...]]:
    """Return for every rank of the job the communicators that it is in, from what each knows for itself.

    NCCL knows no ranks of the job. Raises CommunicatorError if what the ranks say does not fit together.
    """
    members: dict[str, dict[int, int]] = {}
    for rank, own in sorted(places.items()):
        for place in own:
            other = members.setdefault(place.key, {}).setdefault(place.rank, rank)
            if other != rank or not 0 <= place.rank < place.size:
                raise CommunicatorError(
                    f"Rank {rank} says that it is number {place.rank} of {place.size} in the communicator "
                    f"{place.key}; so does rank {other}."
                )
    # Once for each communicator: all ranks of a large job are in one.
    ordered = {key: tuple(rank for _, rank in sorted(known.items())) for key, known in members.items()}
    highest = {key: max(known) for key, known in members.items()}
    made: dict[tuple[str, str, int], Communicator] = {}
    tables = {}
    for rank, own in places.items():
        for place in own:
            if len(ordered[place.key]) != place.size or highest[place.key] >= place.size:
                raise CommunicatorError(
                    f"Rank {rank} is in the communicator {place.key} of {place.size} ranks, but "
                    f"{len(ordered[place.key])} say that they are: it was destroyed or made on some of its "
                    "members only."
                )
            named = place.key, place.parent, place.split
            if named not in made:
                made[named] = Communicator(place.key, ordered[place.key], place.parent, place.split)
        tables[rank] = tuple(made[place.key, place.parent, place.split] for place in own)
    return tables


def creation_order(tables: Mapping[int, Iterable[Communicator]]) -> tuple[Creation, ...]:
    """Return what makes all communicators anew: each rank makes the calls that it is a caller of, in order.

    tables: of every rank of the job, the communicators that it is a member of. One order for all ranks can't
    deadlock: of the calls that are not over, the callers of the first have nothing else to wait for. What was
    split from a communicator that is there no more is made by its members alone.
    Raises CommunicatorError if the tables do not fit together.
    """
    known: dict[str, Communicator] = {}
    holders: dict[str, set[int]] = {}
    for rank, table in sorted(tables.items()):
        for one in table:
            if known.setdefault(one.key, one) != one:
                other = known[one.key]
                raise CommunicatorError(
                    f"Rank {rank} says that the communicator {one.key} has the members {one.members}, split "
                    f"from {one.parent or 'none'}; another rank says {other.members}, split from "
                    f"{other.parent or 'none'}."
                )
            holders.setdefault(one.key, set()).add(rank)
    for key, one in known.items():
        if holders[key] != set(one.members):
            odd = sorted(holders[key] ^ set(one.members))
            raise CommunicatorError(
                f"The communicator {key} has the members {one.members}, but that does not fit rank "
                f"{odd[0]}: it was destroyed or made on some of its members only."
            )
    known = {key: one if one.parent in known else replace(one, parent="") for key, one in known.items()}
    calls: dict[tuple[int, str, int], list[Communicator]] = {}
    for one in known.values():
        # Splits after what they are split from; each split is one call, whatever it makes.
        calls.setdefault((_depth(one, known), one.parent or one.key, one.split), []).append(one)
    return tuple(_creation(calls[call], known) for call in sorted(calls))


def calls(order: Sequence[Creation]) -> dict[int, tuple[Creation, ...]]:
    """Return for each rank that is a caller those that it has to make, in order."""
    found: dict[int, list[Creation]] = {}
    for creation in order:
        for rank in creation.callers:
            found.setdefault(rank, []).append(creation)
    return {rank: tuple(made) for rank, made in found.items()}


def _creation(made: list[Communicator], known: Mapping[str, Communicator]) -> Creation:
    made.sort(key=lambda one: one.key)
    parent = made[0].parent
    callers = known[parent].members if parent else made[0].members
    members = [rank for one in made for rank in one.members]
    if len(set(members)) != len(members) or not set(members) <= set(callers):
        raise CommunicatorError(
            f"Split {made[0].split} of the communicator {parent} can't have made "
            f"{', '.join(one.key for one in made)}: their members are {sorted(members)}, its {callers}."
        )
    return Creation(callers, tuple(made), parent)


def _depth(one: Communicator, known: Mapping[str, Communicator]) -> int:
    depth, seen = 0, {one.key}
    while one.parent:
        one = known[one.parent]
        if one.key in seen:
            raise CommunicatorError(f"The communicator {one.key} was split from itself.")
        seen.add(one.key)
        depth += 1
    return depth
