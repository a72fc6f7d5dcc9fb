"""Which bytes of a snapshot leave the device in which span of a minibatch (REFT's HAS).

First in spans in which the device is idle, as a pipeline's bubbles, then beside computation, and last beside
communication. A span lies between two points that the training's stream comes to, as they were measured in
some minibatches (REFT's Algorithm 1 estimates the bubbles of 1F1B; a measurement is better, and there is one
before the first snapshot is made so).
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise

from jitckpt.decisions.idle_time import (
    CAUTION,
    MOST_SPANS,
    Interval,
    has_drifted,
    most_alike,
    within,
)
from jitckpt.decisions.traffic import Link, Span, profile_spans, schedule_traffic

SHORTEST_SECONDS = 0.05  # of a minibatch: in 10 ms spans were slower, in 100 ms not (bench/snapshot_spans.py)
MOST_TENSORS = 150  # that are copied in spans; so many copies wait on a stream that a host never has to
COMPARED = (
    16  # minibatches with copies in spans and as many without, in turns, show whether spans slow it down
)
COMPARED_LATER = 8  # of so many snapshots one is copied at once, after that
SLOWER = 0.02  # by so much, which is noticed
MORE_THAN_CHANCE = 13  # of these pairs: by chance as many are slower in one of a hundred trainings


class Mark(IntEnum):
    """What the training's stream comes to; as in native/watchdog/network_profile.h."""

    COLLECTIVE = 0
    WAIT_BEGINS = 1
    WAIT_ENDS = 2
    STEP_BEGINS = 3


class Beside(StrEnum):
    """What the device does meanwhile, in the order in which bytes go there."""

    IDLE = "idle"
    COMPUTATION = "computation"
    COMMUNICATION = "communication"


AT_ONCE, LATE = "at once", "late"  # as the minibatch begins; as the next optimizer step does
WHERE = (*Beside, AT_ONCE, LATE)
# What a minibatch carries: no snapshot, one that is copied at once, or one in spans.
CARRIED = ("nothing", AT_ONCE, "in spans")


@dataclass(frozen=True)
class Profiled:
    """A minibatch by the device's clock, in seconds from its beginning.

    collectives, exchanges: begin and end; exchanges are sends and receives alone. points: what the training's
    stream came to, in that order.
    """

    seconds: float
    collectives: list[Interval]
    exchanges: list[Interval]
    points: list[tuple[float, Mark]]


@dataclass(frozen=True)
class Timeline:
    """The spans of a minibatch up to its optimizer step; the number-th begins at the number-th point.

    The point 0 is the minibatch's beginning. beside: what the device does for the greatest part of each.
    """

    seconds: float
    spans: tuple[Span, ...]
    beside: tuple[Beside, ...]

    def has_drifted(self, now: "Timeline", minibatches: int) -> bool:
        """Return whether what was planned for this is not so any more."""
        return self.beside != now.beside or has_drifted(self.spans, now.spans, minibatches)


@dataclass(frozen=True)
class CopyPart:
    """Bytes [begin, end) of the number-th tensor, which are copied from a point on; None: at no span's."""

    number: int
    begin: int
    end: int
    point: int
    beside: Beside | None


def timeline(profiled: Sequence[Profiled]) -> Timeline | None:
    """Return what a minibatch is like; None where minibatches are too different to tell."""
    alike = most_alike([one for one in profiled if one.seconds > 0 and _has_step(one)], _shape)
    if not alike:
        return None
    gaps = [_gaps(one) for one in alike]
    spans = profile_spans(gaps)
    seconds = [dict.fromkeys(Beside, 0.0) for _ in spans]
    marks = [None, *_shape(alike[0])]
    for one, of_one in zip(alike, gaps, strict=True):
        network, collectives = _Covered([*one.collectives, *one.exchanges]), _Covered(one.collectives)
        for number, (begin, end) in enumerate(of_one):
            used = network.between(begin, end)
            # The device is idle where its stream waits while nothing is on the network but sends and
            # receives: then the other side is not there yet.
            is_wait = marks[number] == Mark.WAIT_BEGINS
            idle = used - collectives.between(begin, end) if is_wait else 0.0
            seconds[number][Beside.IDLE] += idle
            seconds[number][Beside.COMMUNICATION] += used - idle
            seconds[number][Beside.COMPUTATION] += end - begin - used
    beside = tuple(max(reversed(Beside), key=lambda which: one[which]) for one in seconds)
    return Timeline(spans[-1].end_seconds, spans, beside)


def _has_step(one: Profiled) -> bool:
    return any(mark == Mark.STEP_BEGINS for _, mark in one.points)


def _shape(one: Profiled) -> tuple[Mark, ...]:
    """Return what comes before the optimizer step."""
    marks = [mark for _, mark in one.points]
    return tuple(marks[: marks.index(Mark.STEP_BEGINS)])


def _gaps(one: Profiled) -> list[Interval]:
    times = [0.0]
    for at, mark in one.points:
        times.append(max(times[-1], at))
        if mark == Mark.STEP_BEGINS:
            break
    return list(pairwise(times))


class _Covered:
    """How much of a time lies in any of some intervals."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._before = [0.0]  # seconds in those before
        for begin, end in sorted(intervals):
            since = max(begin, self._ends[-1]) if self._ends else begin
            if end > since:
                self._begins.append(since)
                self._ends.append(end)
                self._before.append(self._before[-1] + end - since)

    def between(self, begin: float, end: float) -> float:
        return self._until(end) - self._until(begin)

    def _until(self, time: float) -> float:
        place = bisect_right(self._begins, time)
        if not place:
            return 0.0
        return self._before[place] - max(0.0, self._ends[place - 1] - time)


def plan(found: Timeline, sizes: Sequence[int], bytes_per_second: float, share: float) -> list[CopyPart]:
    """Return where the bytes of tensors go, each of them once, in the order of their points.

    share: of the minibatch, in which all is to be copied. What has no room in it is copied from its beginning
    on, as without spans.
    """
    left = sum(sizes)
    room: list[tuple[int, int, Beside | None]] = []
    for beside in Beside:
        numbered = [
            (number, span)
            for number, (span, one) in enumerate(zip(found.spans, found.beside, strict=True))
            if one == beside
        ]
        for number, size in _filled(numbered, left, bytes_per_second, share * found.seconds):
            room.append((number, size, beside))
            left -= size
    parts: list[CopyPart] = []
    number = offset = 0
    for point, size, beside_ in [(0, left, None), *sorted(room, key=lambda one: one[0])]:
        rest = size
        while rest:
            taken = min(rest, sizes[number] - offset)
            if taken:
                parts.append(CopyPart(number, offset, offset + taken, point, beside_))
            rest, offset = rest - taken, offset + taken
            if offset == sizes[number]:
                number, offset = number + 1, 0
    return parts


def _filled(
    numbered: Sequence[tuple[int, Span]], size: int, bytes_per_second: float, until: float
) -> list[tuple[int, int]]:
    """Return how many bytes go into each of these spans, up to a time."""
    usable = [(number, cut) for number, span in numbered for cut in within([span], 0.0, until)]
    longest = sorted(usable, key=lambda one: -one[1].length_seconds)[:MOST_SPANS]
    spans = [span for _, span in sorted(longest)]
    if not spans or size <= 0:
        return []
    link = Link(bytes_per_second, 0.0, buffer_bytes=size, buffers=1)
    # The last takes what has no room in the others.
    schedule = schedule_traffic([*spans, Span(spans[-1].end_seconds, 0.0)], size, 2, link, CAUTION)
    amounts = [0] * len(spans)
    for chunk in schedule.chunks:
        if chunk.span < len(spans):
            amounts[chunk.span] += int(chunk.size_bytes)
    if all(chunk.span < len(spans) for chunk in schedule.chunks):
        amounts[schedule.chunks[-1].span] += size - sum(amounts)  # what rounding has left
    numbers = [number for number, _ in sorted(longest)]
    return [(number, amount) for number, amount in zip(numbers, amounts, strict=True) if amount]


def is_at_once(number: int, compares: bool) -> bool:
    """Return whether the number-th snapshot is copied at once, to compare: every other one, later a few."""
    return number % (2 if compares else COMPARED_LATER) == 1


def is_slower(in_spans: Sequence[float], at_once: Sequence[float]) -> bool | None:
    """Return whether minibatches take longer with copies in spans than at once; None: not known yet."""
    pairs = list(zip(reversed(in_spans), reversed(at_once), strict=False))[:COMPARED]  # the newest
    if len(pairs) < COMPARED:
        return None
    noticed = statistics.median(in_spans) > (1 + SLOWER) * statistics.median(at_once)
    return noticed and sum(one > other for one, other in pairs) >= MORE_THAN_CHANCE
