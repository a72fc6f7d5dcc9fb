"""How often all ranks' processes should be written to a snapshot (`jitckpt run --snapshot-every`)."""

import math
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput, number, positive
from jitckpt.planning.exact import FailureKind, exact_interval_seconds, steady_waste
from jitckpt.planning.units import MINUTE_SECONDS

DIGITS = 2  # of the minutes that are recommended: at its least the loss hardly changes


@dataclass(frozen=True)
class SnapshotCosts:
    """What snapshots cost, and what a failure costs that goes back to one; in seconds.

    pause: for which all ranks are held for a snapshot. between_failures: on average. come_back: from a
    failure until the ranks go on, what they make again apart. written: until a snapshot is on the disk,
    before which there is no other.
    """

    pause: float
    between_failures: float
    come_back: float = 0.0
    written: float = 0.0

    def __post_init__(self) -> None:
        positive("the pause", self.pause)
        positive("the time between failures", self.between_failures)
        number("the time to come back", self.come_back)
        number("the time to write a snapshot", self.written)


def lost_share(costs: SnapshotCosts, interval_seconds: float) -> float:
    """Return the share of all time that is lost: pauses, coming back, and what is made again.

    interval_seconds: from the end of a pause to the next one. Failures may come in all of it.
    """
    kind = FailureKind("a worker dies", 1 / costs.between_failures, costs.come_back, rolls_back=True)
    wasted = steady_waste(positive("the interval", interval_seconds), 1, costs.pause, [kind])
    return 1 - 1 / (1 + wasted)


def best_interval_seconds(costs: SnapshotCosts) -> float:
    """Return the interval at which least is lost, of those at which a snapshot is written before the next."""
    return max(exact_interval_seconds(costs.pause, 1 / costs.between_failures), costs.written)


def best_minutes(costs: SnapshotCosts) -> float:
    """Return the best interval in minutes, with few digits. Raises InvalidInput where no job would end."""
    best = best_interval_seconds(costs) / MINUTE_SECONDS
    minutes = float(f"{best:.{DIGITS}g}")
    if minutes * MINUTE_SECONDS < costs.written:
        last_digit = 10.0 ** (math.floor(math.log10(best)) - DIGITS + 1)
        minutes = float(f"{minutes + last_digit:.{DIGITS}g}")
    if lost_share(costs, minutes * MINUTE_SECONDS) == 1.0:
        raise InvalidInput(
            "the job would never end: failures come faster than a pause passes, or than the ranks come back"
        )
    return minutes
