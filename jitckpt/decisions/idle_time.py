"""In which spans of a minibatch the network is idle, by what was measured, and what is sent in which of them.

GEMINI profiles the first minibatches, and Algorithm 2 (traffic.py) cuts a snapshot into chunks for the spans
between the training's own collectives.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jitckpt.decisions.pace import SHARE
from jitckpt.decisions.traffic import Link, Span, drifted, profile_spans, schedule_traffic

PROFILED_MINIBATCHES = 20
LEAST_ALIKE = 5  # minibatches with as many collectives, without which nothing is known
PROFILED_AGAIN = 200  # minibatches from one profile to the next
MOST_SPANS = 100  # the longest of them
LATENCY_SECONDS = 0.0002  # alpha
BUFFERS, CHUNK_BYTES = 4, 4 << 20  # p sub-buffers, R/p each: what native/memory_tier has on its way at a time
CAUTION = 0.9  # mu
# So many times what is to be sent there is room for, where the spans have it: some come too early, or are
# missed.
SPARE = (8.0, 4.0, 2.0, 1.25, 1.0)

Interval = tuple[float, float]  # begin and end, in seconds from the minibatch's beginning
Minibatch = tuple[float, Sequence[Interval]]  # its seconds; each collective

T = TypeVar("T")


@dataclass(frozen=True)
class Idle:
    """A minibatch's seconds, and the spans in which nothing is sent, in order."""

    seconds: float
    spans: tuple[Span, ...]

    @property
    def idle_seconds(self) -> float:
        return sum(span.length_seconds for span in self.spans)


@dataclass(frozen=True)
class Slots:
    """Begin, end of the span, and bytes, of what is sent in a minibatch. seconds: that all of it takes."""

    slots: tuple[tuple[float, float, int], ...]
    seconds: float


def idle(profiled: Sequence[Minibatch]) -> Idle | None:
    """Return when the network is idle; None where minibatches are too different to tell.

    An evaluation, say, is in few of them: those count that have as many collectives as most have.
    """
    alike = most_alike([one for one in profiled if one[0] > 0], lambda one: len(one[1]))
    if not alike:
        return None
    spans = profile_spans([_gaps(seconds, busy) for seconds, busy in alike])
    longest = sorted(spans, key=lambda span: -span.length_seconds)[:MOST_SPANS]
    useful = [span for span in longest if span.length_seconds > LATENCY_SECONDS]
    seconds = sum(seconds for seconds, _ in alike) / len(alike)
    return Idle(seconds, tuple(sorted(useful, key=lambda span: span.start_seconds)))


def most_alike(profiled: Sequence[T], shape: Callable[[T], Hashable]) -> list[T]:
    """Return those of the shape that most have; none where too few have one."""
    shapes = [shape(one) for one in profiled]
    if not shapes:
        return []
    most, count = Counter(shapes).most_common(1)[0]
    if count < min(LEAST_ALIKE, len(profiled)):
        return []
    return [one for one, its in zip(profiled, shapes, strict=True) if its == most]


def _gaps(seconds: float, busy: Sequence[Interval]) -> list[Interval]:
    """Return the time before each collective in which none was under way, and that behind the last."""
    gaps = []
    free = 0.0
    for begin, end in sorted(busy):
        gaps.append((free, max(free, begin)))
        free = max(free, end)
    return [*gaps, (free, max(free, seconds))]


def common(of_ranks: Sequence[Idle]) -> Idle:
    """Return when none of a host's ranks uses the network."""
    seconds, spans = of_ranks[0].seconds, of_ranks[0].spans
    for other in of_ranks[1:]:
        both = []
        for one in spans:
            for two in other.spans:
                begin = max(one.start_seconds, two.start_seconds)
                end = min(one.end_seconds, two.end_seconds)
                if end - begin > LATENCY_SECONDS:
                    both.append(Span(begin, end - begin, max(one.deviation_seconds, two.deviation_seconds)))
        spans = tuple(both)
        seconds = max(seconds, other.seconds)
    return Idle(seconds, spans)


def has_drifted(planned: Sequence[Span], now: Sequence[Span], minibatches: int) -> bool:
    """Return whether the spans that were planned for are not so any more."""
    return len(planned) != len(now) or bool(drifted(planned, now, minibatches))


def plan(
    found: Idle, snapshot_bytes: float, every: int, copied_seconds: float, bytes_per_second: float
) -> Slots | None:
    """Return what is sent when; None if the spans have no room for it.

    snapshot_bytes: to be sent in `every` minibatches, of which the first copied_seconds have nothing to send.
    """
    if snapshot_bytes <= 0 or bytes_per_second <= 0 or found.seconds <= 0:
        return None
    spans = found.spans if every > 1 else within(found.spans, copied_seconds, SHARE * found.seconds)
    # Of several minibatches the first is half over, or more, before there is something to send.
    minibatches = max(1.0, every - copied_seconds / found.seconds)
    link = Link(bytes_per_second, LATENCY_SECONDS, buffer_bytes=BUFFERS * CHUNK_BYTES, buffers=BUFFERS)
    for spare in SPARE:
        # The last span takes what no other does: so it is one that is over before it begins.
        with_end = (*spans, Span(max([found.seconds, *(span.end_seconds for span in spans)]), 0.0))
        schedule = schedule_traffic(with_end, spare * snapshot_bytes / minibatches, 2, link, CAUTION)
        if all(chunk.span < len(spans) for chunk in schedule.chunks):
            slots = tuple(
                (
                    chunk.send_start_seconds,
                    spans[chunk.span].start_seconds + CAUTION * spans[chunk.span].length_seconds,
                    max(1, int(chunk.size_bytes)),
                )
                for chunk in schedule.chunks
            )
            return Slots(
                slots, sum(chunk.send_end_seconds - chunk.send_start_seconds for chunk in schedule.chunks)
            )
    return None


def least_every(
    found: Idle, snapshot_bytes: float, copied_seconds: float, bytes_per_second: float
) -> int | None:
    """Return the least number of minibatches whose idle time carries a snapshot; None if there is none."""
    room = CAUTION * found.idle_seconds * bytes_per_second
    if room <= 0 or found.seconds <= 0:
        return None
    first = max(1, int(snapshot_bytes / room))  # fewer have not the time
    late = math.ceil(copied_seconds / found.seconds)  # so many have nothing to send yet
    for every in range(first, late + 2 * first + 4):
        if plan(found, snapshot_bytes, every, copied_seconds, bytes_per_second) is not None:
            return every
    return None


def within(spans: Sequence[Span], first: float, last: float) -> tuple[Span, ...]:
    """Return what of the spans lies between: what comes later is too late."""
    within = []
    for span in spans:
        begin, end = max(span.start_seconds, first), min(span.end_seconds, last)
        if end - begin > LATENCY_SECONDS:
            within.append(Span(begin, end - begin, span.deviation_seconds))
    return tuple(within)
