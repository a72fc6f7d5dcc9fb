"""Which states of the ranks are one state of the job.

An image that a rank keeps is a place in the row of its calls. Images of several ranks fit each other if
nothing was said before one of them and heard after another: of each communicator all members have made
equally many collectives, and each has sent a peer as many messages as that one has received. From images
that don't fit, a replay waits for a call that nobody makes again, or takes one message for another.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jitckpt.wire.communicators import EVERYBODY, Membership

# Something that all ranks have done equally often in one state of the job: a communicator, and what.
What = tuple[str, str]


@dataclass(frozen=True)
class Misfit:
    """No choice of states fits; `reason` is a clause that says where."""

    reason: str


def progress(
    places: Mapping[int, Iterable[Membership]], states: Mapping[int, int]
) -> dict[What, dict[int, int]]:
    """Return how often ranks had done what they have to do equally often, each before its state.

    places: the communicators that each rank of the job knows. states: for the ranks that are looked at.
    What a rank has done only grows with its state.
    """
    found: dict[What, dict[int, int]] = defaultdict(dict)
    members = {(place.key, place.rank): rank for rank, own in places.items() for place in own}
    for rank, state in states.items():
        for place in places[rank]:
            found[place.key, "made"][rank] = int(place.since <= state)
            found[place.key, "ended"][rank] = int(place.until < state)
            found[place.key, "collectives"][rank] = 0
            for count in place.counts:
                if count.state != state:
                    continue
                if count.peer == EVERYBODY:
                    found[place.key, "collectives"][rank] = count.sent
                elif (place.key, count.peer) in members and count.peer != place.rank:
                    other = members[place.key, count.peer]
                    if other not in states:
                        continue
                    sent = found[place.key, f"from {place.rank} to {count.peer}"]
                    received = found[place.key, f"from {count.peer} to {place.rank}"]
                    sent[rank], received[rank] = count.sent, count.received
                    # It may have nothing to tell of this one.
                    sent.setdefault(other, 0)
                    received.setdefault(other, 0)
    return found


def unknown_to(places: Mapping[int, Iterable[Membership]]) -> dict[str, set[int]]:
    """Return for each communicator that some of its members don't know which ranks those may be."""
    known = defaultdict[str, set[int]](set)
    sizes: dict[str, int] = {}
    for rank, own in places.items():
        for place in own:
            known[place.key].add(rank)
            sizes[place.key] = place.size
    return {key: set(places) - ranks for key, ranks in known.items() if len(ranks) < sizes[key]}


def ahead(places: Mapping[int, Iterable[Membership]], states: Mapping[int, int]) -> dict[int, str]:
    """Return the ranks whose states come after what another's lacks, each with a clause that says what.

    If there are none, the states fit each other.
    """
    found: dict[int, str] = {}
    for (key, what), numbers in progress(places, states).items():
        behind = min(numbers, key=lambda rank: numbers[rank])
        for rank, number in numbers.items():
            if number > numbers[behind]:
                found.setdefault(
                    rank,
                    f"rank {rank} has made {number} of {_spelled(key, what)} before its state "
                    f"{states[rank]}, rank {behind} {numbers[behind]} before its state {states[behind]}",
                )
    if states.keys() == places.keys():
        for key in unknown_to(places):
            for rank, own in places.items():
                if any(place.key == key and place.since <= states[rank] for place in own):
                    found.setdefault(
                        rank, f"the communicator {key} was destroyed or made on some of its members only"
                    )
    return found


def newest_that_fit(
    places: Mapping[int, Iterable[Membership]], kept: Mapping[int, Iterable[int]]
) -> dict[int, int] | Misfit:
    """Return for each rank the newest of its states such that all fit each other.

    There is no doubt about which: who is ahead of another's newest possible state has to go back, since that
    one can't come forward.
    """
    chosen = {rank: max(states, default=0) for rank, states in kept.items()}
    if empty := [rank for rank, states in kept.items() if not list(states)]:
        return Misfit(f"rank {empty[0]} keeps no state")
    while found := ahead(places, chosen):
        for rank, reason in found.items():
            older = [state for state in kept[rank] if state < chosen[rank]]
            if not older:
                return Misfit(reason)
            chosen[rank] = max(older)
    return chosen


def _spelled(key: str, what: str) -> str:
    if what in ("made", "ended"):
        return f"the communicator {key} ({what})"
    return f"the {what} in the communicator {key}".replace("the from", "the messages from")
