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
class Begun:
    """A start of the ranks: when it began, in seconds of one clock, and of how many hosts."""

    at: float
    hosts: int


def next_look(starts: Sequence[Begun], most: int, waiting: Mapping[str, float], wait: float) -> float | None:
    """Return when hosts may be taken in; None while there is no reason to.

    starts: those that are known, the newest last. waiting: since when each host outside has been there.
    """
    if not starts or starts[-1].hosts >= most or not waiting:
        return None
    steady = min(waiting.values()) + STEADY_SECONDS
    return max(steady, starts[-1].at + pause(starts, wait))


def pause(starts: Sequence[Begun], wait: float) -> float:
    """Return how many seconds the newest start is left alone: more after hosts that came and went."""
    short = 0
    for before, grown, after in reversed(list(zip(starts, starts[1:], starts[2:], strict=False))):
        if after.hosts >= grown.hosts or grown.hosts <= before.hosts:
            continue  # nothing was lost, or nothing had been won
        if after.at - grown.at >= LASTING * wait:
            break
        short += 1
    return wait * float(1 << min(short, MOST_DOUBLINGS))


def micro_batches(of_each: int, all_ranks: int, ranks: int) -> int:
    """Return how many micro-batches a rank makes in a step for the global batch to stay, or nearly so.

    of_each: the same where all ranks are there.
    """
    return max(1, round(Fraction(of_each * all_ranks, ranks)))


def part_of_batch(of_each: int, all_ranks: int, ranks: int) -> Fraction:
    """Return how large the global batch is with so many ranks, as a part of what it is with all."""
    return Fraction(micro_batches(of_each, all_ranks, ranks) * ranks, of_each * all_ranks)
