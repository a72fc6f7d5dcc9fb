"""Expected run time, exactly, for failures without memory (exponential): failures in recoveries, in saves,
several kinds of failure, finite jobs. Beyond the papers; extends Daly (FGCS 2006).

Two fates: after a failure the job either *resumes* (its last minibatch is redone: just-in-time, memory
tier) or *rolls back* to its last periodic save. An outage during an outage starts the recovery of the
worse of both anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput, number, positive, whole


@dataclass(frozen=True)
class FailureKind:
    """One kind of failure as the job feels it."""

    name: str
    failures_per_second: float  # of the whole job
    outage_seconds: float  # from the failure until training goes on, redone work apart
    rolls_back: bool  # to the last periodic save; else only the current minibatch is redone
    recovery_fails_share: float = 0.0  # of recoveries that have to be done again at their end

    def __post_init__(self) -> None:
        number(f"failures_per_second of {self.name}", self.failures_per_second)
        number(f"outage_seconds of {self.name}", self.outage_seconds)
        if number(f"recovery_fails_share of {self.name}", self.recovery_fails_share, high=1.0) == 1.0:
            raise InvalidInput(f"recovery_fails_share of {self.name} is 1: no recovery would ever succeed")


@dataclass(frozen=True)
class Schedule:
    """A finite job cut by periodic saves, one between two segments; all segments but the last near equal.

    The last may be longer: no save follows it, unless `save_at_end`.
    """

    minibatches: int
    minibatch_seconds: float
    segments: int
    last_segment_minibatches: int
    save_seconds: float
    save_at_end: bool = False

    def __post_init__(self) -> None:
        whole("minibatches", self.minibatches, low=1)
        positive("minibatch_seconds", self.minibatch_seconds)
        whole("segments", self.segments, low=1, high=self.minibatches)
        most = self.minibatches - self.segments + 1
        least = most if self.segments == 1 else 1
        whole("last_segment_minibatches", self.last_segment_minibatches, low=least, high=most)
        number("save_seconds", self.save_seconds)


@dataclass(frozen=True)
class _Stage:
    """A minibatch or a save: the chance to end without rolling back, and the expected time until either."""

    passes: float
    seconds: float


def _outage(kinds: Sequence[FailureKind], rate: float) -> tuple[float, float]:
    """For an outage begun by a random kind: the chance to end without rolling back, the expected length.

    The kinds are states, ordered by severity; state k is left upwards only, so the equations are triangular.
    """
    order = sorted(kinds, key=lambda kind: (kind.rolls_back, kind.outage_seconds))
    seconds = [0.0] * len(order)
    resumes = [0.0] * len(order)
    for k in reversed(range(len(order))):
        quiet = math.exp(-rate * order[k].outage_seconds)
        done = quiet * (1 - order[k].recovery_fails_share)
        interrupted = -math.expm1(-rate * order[k].outage_seconds)
        worse = [(order[j].failures_per_second / rate, j) for j in range(k + 1, len(order))]
        up = sum(chance for chance, _ in worse)
        # Leaves state k by ending (done) or for a worse state (interrupted * up); else starts k anew.
        leaves = done + interrupted * up
        if leaves == 0:
            return 0.0, math.inf
        attempt = interrupted / rate
        seconds[k] = (attempt + interrupted * sum(c * seconds[j] for c, j in worse)) / leaves
        resumes[k] = (
            done * (0.0 if order[k].rolls_back else 1.0) + interrupted * sum(c * resumes[j] for c, j in worse)
        ) / leaves
    share = [kind.failures_per_second / rate for kind in order]
    return (
        sum(s * r for s, r in zip(share, resumes, strict=True)),
        sum(s * t for s, t in zip(share, seconds, strict=True)),
    )


def _stage(length_seconds: float, rate: float, resumes: float, outage_seconds: float) -> _Stage:
    if rate == 0 or length_seconds == 0:
        return _Stage(1.0, length_seconds)
    quiet = math.exp(-rate * length_seconds)
    fails = -math.expm1(-rate * length_seconds)
    leaves = 1 - fails * resumes  # quiet + fails * (1 - resumes)
    if leaves <= 0:
        return _Stage(0.0, math.inf)
    return _Stage(quiet / leaves, fails * (1 / rate + outage_seconds) / leaves)


def _segment_seconds(minibatch: _Stage, count: float, save: _Stage | None) -> float:
    """Expected time to pass `count` minibatches and the save in one go, starting anew at each roll back."""
    log_pass = math.log(minibatch.passes) if minibatch.passes > 0 else -math.inf
    try:
        # sum over i of passes^i, i < count, divided by passes^count
        series = count if log_pass == 0 else math.expm1(-count * log_pass) / (1 - minibatch.passes)
    except OverflowError:
        return math.inf
    if math.isinf(series) or math.isinf(minibatch.seconds):
        return math.inf
    if save is None:
        return minibatch.seconds * series
    if save.passes == 0:
        return math.inf
    return (minibatch.seconds * series + save.seconds) / save.passes


def expected_seconds(schedule: Schedule, kinds: Sequence[FailureKind]) -> float:
    """Expected wall time of the whole job; infinite when it overflows (the job would not end)."""
    rate = sum(kind.failures_per_second for kind in kinds)
    resumes, outage = _outage([k for k in kinds if k.failures_per_second > 0], rate) if rate else (1.0, 0.0)
    minibatch = _stage(schedule.minibatch_seconds, rate, resumes, outage)
    save = _stage(schedule.save_seconds, rate, resumes, outage)
    total = _segment_seconds(
        minibatch, schedule.last_segment_minibatches, save if schedule.save_at_end else None
    )
    if schedule.segments > 1:
        others = schedule.segments - 1
        short, longer = divmod(schedule.minibatches - schedule.last_segment_minibatches, others)
        total += longer * _segment_seconds(minibatch, short + 1, save) if longer else 0.0
        total += (others - longer) * _segment_seconds(minibatch, short, save)
    return total


def best_schedule(
    minibatches: int,
    minibatch_seconds: float,
    save_seconds: float,
    kinds: Sequence[FailureKind],
    save_at_end: bool = False,
) -> tuple[Schedule, float]:
    """The schedule with the least expected time of all, and that time.

    A segment's time is convex in its length, so equal segments are best, and the total is convex in
    their number and in the length of the last.
    """
    whole("minibatches", minibatches, low=1)

    def schedule(segments: int) -> Schedule:
        def with_last(last: int) -> Schedule:
            return Schedule(minibatches, minibatch_seconds, segments, last, save_seconds, save_at_end)

        most = minibatches - segments + 1
        last = _least(lambda n: expected_seconds(with_last(n), kinds), most if segments == 1 else 1, most)
        return with_last(last)

    best = schedule(_least(lambda segments: expected_seconds(schedule(segments), kinds), 1, minibatches))
    seconds = expected_seconds(best, kinds)
    if math.isinf(seconds):
        raise InvalidInput(_NEVER_ENDS)
    return best, seconds


_NEVER_ENDS = "the job would never end: failures come faster than a minibatch, a save or a recovery passes"


def _least(value: Callable[[int], float], low: int, high: int) -> int:
    """The whole number in [low, high] with the least convex `value`, which may be infinite at the ends."""
    while high - low > 3:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        at_left, at_right = value(left), value(right)
        if at_left > at_right or (math.isinf(at_left) and value(low) == math.inf):
            low = left + 1
        else:
            high = right
    return min(range(low, high + 1), key=value)


def steady_waste(
    minibatch_seconds: float,
    minibatches_per_save: int | None,
    save_seconds: float,
    kinds: Sequence[FailureKind],
) -> float:
    """Wasted seconds per useful second in the long run; without `minibatches_per_save`, no periodic save."""
    positive("minibatch_seconds", minibatch_seconds)
    number("save_seconds", save_seconds)
    rate = sum(kind.failures_per_second for kind in kinds)
    if rate == 0:
        return (
            0.0 if minibatches_per_save is None else save_seconds / (minibatches_per_save * minibatch_seconds)
        )
    resumes, outage = _outage([k for k in kinds if k.failures_per_second > 0], rate)
    minibatch = _stage(minibatch_seconds, rate, resumes, outage)
    if minibatches_per_save is None:
        if any(kind.rolls_back and kind.failures_per_second > 0 for kind in kinds):
            return math.inf  # every roll back is to the very start
        return minibatch.seconds / minibatch_seconds - 1
    whole("minibatches_per_save", minibatches_per_save, low=1)
    save = _stage(save_seconds, rate, resumes, outage)
    useful = minibatches_per_save * minibatch_seconds
    return _segment_seconds(minibatch, minibatches_per_save, save) / useful - 1


def best_minibatches_per_save(
    minibatch_seconds: float, save_seconds: float, kinds: Sequence[FailureKind]
) -> int | None:
    """The exact optimum of `steady_waste`; None when no failure rolls back (a save would only cost)."""
    rollback_rate = sum(kind.failures_per_second for kind in kinds if kind.rolls_back)
    if rollback_rate == 0:
        return None

    def waste(count: int) -> float:
        return steady_waste(minibatch_seconds, count, save_seconds, kinds)

    # The exact interval is shorter than Young's; four of his leave room for rounding to minibatches.
    most = 2 + math.ceil(4 * math.sqrt(2 * save_seconds / rollback_rate) / minibatch_seconds)
    best = _least(waste, 1, most)
    if math.isinf(waste(best)):
        raise InvalidInput(_NEVER_ENDS)
    return best


def daly_interval_seconds(save_seconds: float, failures_per_second: float) -> float:
    """Daly (2006), eq. 37: useful time between saves, to higher order."""
    mean = 1 / positive("failures_per_second", failures_per_second)
    if number("save_seconds", save_seconds) >= 2 * mean:
        return mean
    ratio = save_seconds / (2 * mean)
    return math.sqrt(2 * save_seconds * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def exact_interval_seconds(save_seconds: float, failures_per_second: float) -> float:
    """The optimum that Daly's series approaches, M (1 + W(-e^(-1 - o / M))), W being Lambert's function.

    Solved by Newton's method for x = tau / M in  e^(x + o/M) (1 - x) = 1.
    """
    mean = 1 / positive("failures_per_second", failures_per_second)
    delta = number("save_seconds", save_seconds) / mean
    if delta == 0:
        return 0.0
    x = min(daly_interval_seconds(save_seconds, failures_per_second) / mean, 1.0)
    for _ in range(50):
        value = -math.expm1(-(x + delta)) - x  # zero where 1 - x = e^-(x + delta)
        step = value / (math.exp(-(x + delta)) - 1)
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x * mean
