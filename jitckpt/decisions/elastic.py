"""When a job that may go on with fewer hosts takes in more, and how its global batch is kept. Pure.

That it may go on with fewer is decided where hosts meet (torch's rendezvous, at least so many of them) and by
quorum.py. Taking in more costs a save and a start of all ranks: a host that comes and goes must not make the
job do that again and again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

STEADY_SECONDS = 5.0  # that a host has to have been there before it is taken in
LASTING = 10  # times --wait: a start with more hosts that has kept them for so long was worth it
MOST_DOUBLINGS = 6


@dataclass(frozen=True)
class StartBegun:
    """A start of the ranks: when it began, in seconds of one clock, and of how many hosts.

    took_in: the one before was ended for it, to take in hosts.
    """

    at: float
    hosts: int
    took_in: bool = False


def next_look(
    starts: Sequence[StartBegun], most: int, waiting: Mapping[str, float], wait: float
) -> float | None:
    """Return when hosts may be taken in; None while there is no reason to.

    starts: those that are known, the newest last. waiting: since when each host outside has been there.
    """
    if not starts or starts[-1].hosts >= most or not waiting:
        return None
    steady = min(waiting.values()) + STEADY_SECONDS
    return max(steady, starts[-1].at + pause(starts, wait))


def pause(starts: Sequence[StartBegun], wait: float) -> float:
    """Return how many seconds the newest start is left alone: more after hosts that came and went."""
    in_vain = 0
    for at in range(len(starts) - 1, 0, -1):
        start, after = starts[at], starts[at + 1] if at + 1 < len(starts) else None
        if not start.took_in:
            continue
        if start.hosts <= starts[at - 1].hosts:
            in_vain += 1  # who waited was gone
        elif after is not None and after.hosts < start.hosts and after.at - start.at < LASTING * wait:
            in_vain += 1
        elif after is not None:
            break
    return wait * float(1 << min(in_vain, MOST_DOUBLINGS))


def micro_batches(of_each: int, all_ranks: int, ranks: int) -> int:
    """Return how many micro-batches a rank makes in a step for the global batch to stay, or nearly so.

    of_each: the same where all ranks are there.
    """
    return max(1, round(Fraction(of_each * all_ranks, ranks)))


def part_of_batch(of_each: int, all_ranks: int, ranks: int) -> Fraction:
    """Return how large the global batch is with so many ranks, as a part of what it is with all."""
    return Fraction(micro_batches(of_each, all_ranks, ranks) * ranks, of_each * all_ranks)
