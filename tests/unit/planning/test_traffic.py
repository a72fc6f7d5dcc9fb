import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.traffic import (
    Link,
    Span,
    TrafficSchedule,
    drifted,
    profile_spans,
    schedule_traffic,
)

LINK = Link(
    bytes_per_second=100.0, latency_seconds=0.1, copy_bytes_per_second=100.0, buffer_bytes=80, buffers=4
)


def used_seconds(schedule: TrafficSchedule, span: int) -> float:
    """From the span's start to the end of its last chunk."""
    ends = [chunk.send_end_seconds for chunk in schedule.chunks if chunk.span == span]
    return max(ends) - schedule.spans[span].start_seconds if ends else 0.0


def delay_seconds(schedule: TrafficSchedule, actual: Sequence[Span]) -> float:
    """How much longer a minibatch gets with a schedule made for other spans than it meets."""
    return sum(max(0.0, used_seconds(schedule, i) - span.length_seconds) for i, span in enumerate(actual))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Span], float, int, Link, float]:
    spans = []
    now = 0.0
    for _ in range(draw(st.integers(1, 8))):
        now += draw(st.floats(0, 5))
        spans.append(Span(now, draw(st.floats(0, 5))))
        now = spans[-1].end_seconds
    link = Link(
        bytes_per_second=draw(st.floats(1, 1e3)),
        latency_seconds=draw(st.floats(0, 0.5)),
        copy_bytes_per_second=draw(st.one_of(st.floats(1, 1e3), st.just(math.inf))),
        buffer_bytes=draw(st.floats(10, 1e3)),
        buffers=draw(st.integers(1, 6)),
    )
    size = draw(st.floats(0, 2e3))
    return spans, size, draw(st.integers(1, 4)), link, draw(st.floats(0.05, 1.0))


@given(problems())
@example(([Span(0.0, 0.0, 0.0)], 683.3281452201584, 3, Link(1.0, 0.0, 1.0, 683.3281452201584, 4), 1.0))
def test_a_schedule_keeps_every_promise(problem: tuple[list[Span], float, int, Link, float]) -> None:
    spans, size, replicas, link, caution = problem
    schedule = schedule_traffic(spans, size, replicas, link, caution)
    # Every byte once, in order, of each remote copy.
    for copy in range(replicas - 1):
        chunks = [chunk for chunk in schedule.chunks if chunk.copy == copy]
        offset = 0.0
        for chunk in chunks:
            assert chunk.offset_bytes == offset
            offset += chunk.size_bytes
        assert offset == pytest.approx(size, rel=1e-9)
    assert all(chunk.copy < replicas - 1 for chunk in schedule.chunks)
    # No chunk over R / p, none over mu times its span, except in the last.
    for chunk in schedule.chunks:
        span = spans[chunk.span]
        assert 0 < chunk.size_bytes <= link.chunk_bytes
        assert chunk.send_start_seconds >= span.start_seconds
        assert chunk.send_end_seconds - chunk.send_start_seconds == pytest.approx(
            link.send_seconds(chunk.size_bytes), abs=1e-9
        )
        if chunk.span < len(spans) - 1:
            assert chunk.send_end_seconds <= span.start_seconds + caution * span.length_seconds
    # One at a time on the network, and a chunk only into a buffer that has been copied out.
    for before, after in zip(schedule.chunks, schedule.chunks[1:], strict=False):
        assert after.send_start_seconds >= before.send_end_seconds
        assert after.copied_seconds >= before.copied_seconds
    for before, after in zip(schedule.chunks, schedule.chunks[link.buffers :], strict=False):
        assert after.send_start_seconds >= before.copied_seconds
    if schedule.chunks:
        end = schedule.chunks[-1].send_end_seconds
        assert schedule.overrun_seconds == pytest.approx(max(0.0, end - spans[-1].end_seconds))


def test_more_buffers_pipeline() -> None:
    """GEMINI, Figure 16: with one buffer every chunk waits for the copy of the one before."""
    spans = [Span(0, 100.0)]
    one = schedule_traffic(spans, 1000, 2, Link(100.0, 0.0, 100.0, 80, 1), 1.0)
    four = schedule_traffic(spans, 1000, 2, Link(100.0, 0.0, 100.0, 80, 4), 1.0)
    assert used_seconds(four, 0) == pytest.approx(10.0)  # the network never waits
    assert used_seconds(one, 0) == pytest.approx(20.0 - 0.4)  # 12 chunks of 0.8 s and one of 0.4 s, twice


def test_the_printed_algorithm_where_it_is_right() -> None:
    """One copy, spans that hold whole chunks: sizes as by hand."""
    link = Link(100.0, 0.1, buffer_bytes=80, buffers=4)  # 20 bytes in 0.3 s
    schedule = schedule_traffic([Span(0, 0.7), Span(1, 1.0), Span(3, 0.1)], 75, 2, link, 1.0)
    assert [(chunk.span, round(chunk.size_bytes, 9)) for chunk in schedule.chunks] == [
        (0, 20), (0, 20), (1, 20), (1, 15),
    ]  # fmt: skip
    assert schedule.overrun_seconds == 0


def test_short_spans_end() -> None:
    """Error 3 of the printed pseudo-code: a span shorter than the start-up time loops for ever."""
    schedule = schedule_traffic([Span(0, 0.05), Span(1, 0.1), Span(2, 0.0)], 10, 2, LINK)
    assert {chunk.span for chunk in schedule.chunks} == {2}
    assert schedule.overrun_seconds == pytest.approx(0.2)


def test_one_replica_sends_nothing_and_three_send_twice() -> None:
    """Errors 2 and 6."""
    assert schedule_traffic([Span(0, 9)], 100, 1, LINK).chunks == ()
    assert sum(c.size_bytes for c in schedule_traffic([Span(0, 9)], 100, 3, LINK).chunks) == pytest.approx(
        200
    )


def test_the_spans_given_stay_as_they_are() -> None:
    """Error 4."""
    spans = [Span(0, 1.0), Span(2, 0.1)]
    assert schedule_traffic(spans, 500, 2, LINK).spans == (Span(0, 1.0), Span(2, 0.1))


def test_units_scaled_by_ten() -> None:
    slow = Link(10.0, 1.0, 10.0, 80, 4)
    spans = [Span(0.2, 1.1), Span(2, 3.0), Span(6, 0.5)]
    tenfold = [Span(10 * s.start_seconds, 10 * s.length_seconds) for s in spans]
    fast, slower = schedule_traffic(spans, 150, 2, LINK), schedule_traffic(tenfold, 150, 2, slow)
    assert [c.size_bytes for c in slower.chunks] == pytest.approx([c.size_bytes for c in fast.chunks])
    assert slower.overrun_seconds == pytest.approx(10 * fast.overrun_seconds)


def test_profile_and_drift() -> None:
    generator = random.Random(2)

    def observed(mean: float) -> list[list[tuple[float, float]]]:
        return [
            [(0.0, generator.gauss(1.0, 0.05)), (2.0, 2.0 + generator.gauss(mean, 0.05))] for _ in range(20)
        ]

    planned = profile_spans(observed(1.0))
    assert planned[0].length_seconds == pytest.approx(1.0, abs=0.05)
    assert planned[1].deviation_seconds == pytest.approx(0.05, abs=0.03)
    assert drifted(planned, profile_spans(observed(1.0)), 20) == []
    shorter = profile_spans(observed(0.7))
    assert drifted(planned, shorter, 20) == [1]
    # A schedule for the longer spans now delays training, and one made anew does not.
    old = schedule_traffic(planned, 150, 2, LINK, 0.9)
    new = schedule_traffic(shorter, 150, 2, LINK, 0.9)
    assert delay_seconds(old, shorter) > 0.1
    assert delay_seconds(new, shorter) < delay_seconds(old, shorter)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput, match="spans is empty"):
        schedule_traffic([], 1, 2, LINK)
    with pytest.raises(InvalidInput, match=r"caution is 1\.5"):
        schedule_traffic([Span(0, 1)], 1, 2, LINK, 1.5)
    with pytest.raises(InvalidInput, match="start_seconds of span 1"):
        schedule_traffic([Span(0, 2), Span(1, 2)], 1, 2, LINK)
    with pytest.raises(InvalidInput, match="length_seconds of span 0 is nan"):
        schedule_traffic([Span(0, math.nan)], 1, 2, LINK)
    with pytest.raises(InvalidInput, match="bytes_per_second is 0"):
        Link(0.0, 0.1)
    with pytest.raises(InvalidInput, match="buffers is 0"):
        Link(1.0, 0.1, buffers=0)
    with pytest.raises(InvalidInput, match="different numbers of idle spans"):
        profile_spans([[(0.0, 1.0)], []])
