"""Which bytes of a snapshot leave the device in which span of a minibatch."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions import snapshot_spans
from jitckpt.decisions.idle_time import CAUTION, LATENCY_SECONDS
from jitckpt.decisions.snapshot_spans import COMPARED, Beside, CopyPart, Mark, Profiled, Timeline, timeline
from jitckpt.decisions.traffic import Span

STAGE = Profiled(
    1.2,
    collectives=[(0.8, 0.95)],
    exchanges=[(0.0, 0.3), (0.5, 0.6), (0.55, 0.7)],
    points=[
        (0.0, Mark.COLLECTIVE),
        (0.0, Mark.WAIT_BEGINS),  # for the first activations
        (0.3, Mark.WAIT_ENDS),
        (0.55, Mark.WAIT_BEGINS),  # for gradients
        (0.7, Mark.WAIT_ENDS),
        (0.8, Mark.COLLECTIVE),
        (0.9, Mark.WAIT_BEGINS),  # for their sum
        (0.95, Mark.WAIT_ENDS),
        (1.0, Mark.STEP_BEGINS),
        (1.1, Mark.WAIT_BEGINS),
    ],
)


def test_a_stage_that_waits_for_another_is_idle() -> None:
    found = timeline([STAGE] * 5)
    assert found is not None
    assert found.seconds == pytest.approx(1.0), "up to the optimizer step"
    assert list(map(str, found.beside)) == [
        *("communication", "communication", "idle", "computation", "idle"),  # the first two have no length
        *("computation", "communication", "communication", "computation"),
    ]
    assert [span.start_seconds for span in found.spans] == pytest.approx(
        [0.0, 0.0, 0.0, 0.3, 0.55, 0.7, 0.8, 0.9, 0.95]
    )


def test_of_a_training_whose_minibatches_differ_nothing_is_known() -> None:
    evaluation = Profiled(3.0, [(0.0, 0.1)] * 9, [], [(0.1, Mark.COLLECTIVE)] * 9 + [(2.0, Mark.STEP_BEGINS)])
    assert timeline([*[STAGE] * 6, evaluation]) == timeline([STAGE] * 6)
    without_step = Profiled(1.0, [], [], STAGE.points[:3])
    assert timeline([without_step] * 20) is None
    each_another = [
        Profiled(1.0, [], [], [(0.5, Mark.COLLECTIVE)] * count + [(1.0, Mark.STEP_BEGINS)])
        for count in range(20)
    ]
    assert timeline(each_another) is None
    assert timeline([]) is None


def test_it_is_planned_anew_where_spans_have_drifted() -> None:
    found = timeline([STAGE] * 20)
    assert found is not None
    assert not found.has_drifted(found, 20)
    longer = Timeline(1.0, (*found.spans[:2], Span(0.0, 0.4), *found.spans[3:]), found.beside)
    assert found.has_drifted(longer, 20)
    assert found.has_drifted(Timeline(1.0, found.spans[:-1], found.beside[:-1]), 20)
    others = (*found.beside[:-1], Beside.IDLE)
    assert found.has_drifted(Timeline(1.0, found.spans, others), 20)


timelines = st.lists(st.tuples(st.floats(0, 0.2), st.sampled_from(Beside)), min_size=1, max_size=40).map(
    lambda lengths: Timeline(
        sum(length for length, _ in lengths),
        tuple(
            Span(sum(length for length, _ in lengths[:number]), length)
            for number, (length, _) in enumerate(lengths)
        ),
        tuple(beside for _, beside in lengths),
    )
)


@given(
    timelines,
    st.lists(st.integers(0, 10**8), max_size=20),
    st.floats(1e6, 1e11),
    st.floats(0.1, 1.0),
)
def test_all_bytes_go_once_and_idle_spans_come_first(
    found: Timeline, sizes: list[int], bytes_per_second: float, share: float
) -> None:
    parts = snapshot_spans.plan(found, sizes, bytes_per_second, share)
    ends = [0] * len(sizes)
    for part in parts:
        assert part.begin == ends[part.number] < part.end
        ends[part.number] = part.end
    assert ends == sizes
    assert [part.point for part in parts] == sorted(part.point for part in parts)

    in_span: Counter[int] = Counter()
    by_kind: Counter[Beside | None] = Counter()
    for part in parts:
        by_kind[part.beside] += part.end - part.begin
        if part.beside is not None:
            assert part.beside == found.beside[part.point]
            in_span[part.point] += part.end - part.begin
    room = [_room(span, share * found.seconds) * bytes_per_second for span in found.spans]
    for point, size in in_span.items():
        assert size <= room[point] + len(found.spans) + 1, "what has no room goes at once"
    # Nothing goes to a later kind while an earlier one has room.
    seen_later = 0
    for beside in reversed([*Beside, None]):
        if seen_later:
            of_kind = sum(one for one, kind in zip(room, found.beside, strict=True) if kind == beside)
            assert by_kind[beside] >= of_kind - 2 * len(found.spans) - 1e-6 * of_kind
        if by_kind[beside]:
            seen_later += 1


def _room(span: Span, until: float) -> float:
    usable = min(span.end_seconds, until) - span.start_seconds
    return CAUTION * usable if usable > LATENCY_SECONDS else 0.0


def test_bytes_that_fit_into_the_bubbles_all_go_there() -> None:
    found = timeline([STAGE] * 5)
    assert found is not None
    sizes = [10_000, 30_000]
    assert snapshot_spans.plan(found, sizes, 1e5, 0.8) == [
        CopyPart(0, 0, 10_000, 2, Beside.IDLE),
        CopyPart(1, 0, 17_000, 2, Beside.IDLE),
        CopyPart(1, 17_000, 30_000, 4, Beside.IDLE),
    ]
    beside = [part.beside for part in snapshot_spans.plan(found, sizes, 5.5e4, 1.0)]
    assert set(beside) == {Beside.IDLE, Beside.COMPUTATION}
    assert {part.beside for part in snapshot_spans.plan(found, sizes, 4.2e4, 1.0)} == {*Beside, None}


def test_spans_have_to_be_no_slower() -> None:
    assert snapshot_spans.is_slower([1.0] * COMPARED, [1.0] * (COMPARED - 1)) is None
    assert snapshot_spans.is_slower([1.01] * COMPARED, [1.0] * COMPARED) is False
    assert snapshot_spans.is_slower([1.1] * COMPARED, [1.0] * COMPARED) is True
    by_turns = [1.1, 1.2] * (COMPARED // 2)
    assert snapshot_spans.is_slower(by_turns, [1.0, 1.3] * (COMPARED // 2)) is False, "that may be chance"
