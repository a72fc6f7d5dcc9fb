"""What is put off to spans of the minibatch is copied once, counted, and held until it is copied."""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jitckpt.decisions.pace import LEAST_SHARE, SHARE
from jitckpt.decisions.snapshot_spans import COMPARED, Beside, Timeline
from jitckpt.decisions.traffic import Span
from jitckpt.tiers import host_memory
from jitckpt.worker.saving.in_spans import LATE_IN_A_ROW, CopiesInSpans

FOUND = Timeline(1.0, (Span(0.0, 0.5), Span(0.5, 0.5)), (Beside.COMPUTATION, Beside.IDLE))
TENSORS = [torch.zeros(100, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8)]


class Library:
    """Of whose pieces so many are still to come."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int, int]] = []
        self.left = 0
        self.calls: list[str] = []

    def copy_in_turn(self, pieces: list[tuple[int, int, int, int]], *_: object) -> None:
        self.pieces = pieces

    def copy_rest(self) -> int:
        self.calls.append("rest")
        return self.left

    def copy_no_more(self) -> None:
        self.calls.append("no more")


class Times:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"nothing": [], "at once": [], "in spans": []}

    def carries(self, carried: str) -> None:
        pass


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = host_memory.create()
    yield descriptor
    os.close(descriptor)


def made(memory: int, *, sends: bool = False) -> tuple[CopiesInSpans, Any, Any, list[str]]:
    library: Any = Library()
    times: Any = Times()
    warnings: list[str] = []
    spans = CopiesInSpans(library, memory, times, sends=sends, warn=warnings.append, shortest=0.5)
    spans._bytes_per_second = 1000.0
    return spans, library, times, warnings


def begin(spans: CopiesInSpans) -> None:
    stream: Any = SimpleNamespace(cuda_stream=7)
    parts = spans.choose(TENSORS) or spans.choose(TENSORS)  # every other one is copied at once
    spans.begin([(one, one) for one in TENSORS], parts, 5, (0, 1), stream)


def test_nothing_is_put_off_where_nothing_is_known(memory: int) -> None:
    spans, *_ = made(memory)
    assert spans.choose(TENSORS) == []
    spans.found(FOUND)
    chosen = [bool(spans.choose(TENSORS)) for _ in range(4)]
    assert sorted(chosen) == [False, False, True, True], "by turns, to compare"
    spans._compares = False
    assert sum(bool(spans.choose(TENSORS)) for _ in range(16)) == 14
    for found in (None, Timeline(0.4, (Span(0.0, 0.2), Span(0.2, 0.2)), FOUND.beside)):
        spans.found(found)
        assert spans.choose(TENSORS) == spans.choose(TENSORS) == []
    spans.found(FOUND)
    spans._bytes_per_second = 0.0
    assert spans.choose(TENSORS) == spans.choose(TENSORS) == []


def test_bytes_are_counted_where_they_went(memory: int) -> None:
    spans, library, *_ = made(memory)
    spans.found(FOUND)
    begin(spans)
    assert [(point, size) for point, _, _, size in library.pieces] == [(1, 100), (1, 50)]
    spans.rest()
    spans.rest()
    assert library.calls == ["rest"]
    assert host_memory.copied(memory) == {
        "idle": 150,
        "computation": 0,
        "communication": 0,
        "at once": 5,
        "late": 0,
    }


def test_points_that_do_not_come_end_the_spans_until_it_is_measured_again(memory: int) -> None:
    spans, library, *_ = made(memory)
    spans.found(FOUND)
    library.left = 1
    for _ in range(LATE_IN_A_ROW):
        begin(spans)
        spans.rest()
    assert host_memory.copied(memory)["late"] == LATE_IN_A_ROW * 50
    assert spans.choose(TENSORS) == spans.choose(TENSORS) == []
    spans.found(FOUND)
    assert spans.choose(TENSORS) or spans.choose(TENSORS)


def test_where_the_training_does_not_go_on_nothing_is_waited_for(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, library, *_ = made(memory)
    spans.found(FOUND)
    begin(spans)
    spans.hurry()
    assert library.calls == []
    now = time.monotonic() + 10
    monkeypatch.setattr(time, "monotonic", lambda: now)
    spans.hurry()
    spans.hurry()
    assert library.calls == ["rest"]


def test_what_is_still_to_come_is_held_until_it_is_copied_or_dropped(memory: int) -> None:
    """Else its memory could be given to others, or back to the device, before it is read."""
    spans, library, *_ = made(memory)
    spans.found(FOUND)
    begin(spans)
    assert spans._under_way is not None
    assert [one for _, one in spans._under_way.held] == TENSORS
    spans.drop()
    assert spans._under_way is None
    assert library.calls == ["no more"]


def test_copies_come_later_only_as_long_as_nobody_waits(memory: int) -> None:
    spans, *_ = made(memory, sends=True)
    assert spans._share == LEAST_SHARE
    for _ in range(10):
        spans.waited(0.0, 1.0)
    assert LEAST_SHARE < (grown := spans._share) < SHARE
    spans.waited(0.5, 1.0)
    assert spans._share < grown
    assert made(memory)[0]._share == SHARE, "nothing is sent"


def test_spans_that_slow_the_training_down_are_given_up_with_a_sentence(memory: int) -> None:
    spans, _, times, warnings = made(memory)
    spans.found(FOUND)
    spans.choose(TENSORS)
    times.seconds |= {"at once": [1.0] * COMPARED, "in spans": [1.1] * COMPARED}
    spans.compare()
    assert warnings == [
        "Snapshots leave the device at once from now on, and in no spans of a minibatch: minibatches took "
        "1.1 s with them and 1 s without."
    ]
    assert spans.choose(TENSORS) == spans.choose(TENSORS) == []
    assert host_memory.minibatch_seconds(memory) == {"at once": 1.0, "in spans": 1.1}


def test_a_failure_of_the_planning_costs_the_spans_and_nothing_else(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, *_, warnings = made(memory)
    spans.found(FOUND)
    monkeypatch.setattr("jitckpt.decisions.snapshot_spans.plan", lambda *_: 1 // 0)
    assert spans.choose(TENSORS) == spans.choose(TENSORS) == []
    assert len(warnings) == 1
    assert "could not be planned (ZeroDivisionError" in warnings[0]
