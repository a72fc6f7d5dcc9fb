"""Step markers and rehearsed failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_markers_tell_what_the_device_has_finished(run_program: Callable[..., Any]) -> None:
    seen = run_program("steps")
    assert seen["base"] == [10, 10, 10, 10, 0]
    assert seen["ahead"] == [13, 13, 10, 10, 6]
    assert seen["waits"], "the host may not run more than three steps ahead"
    assert seen["save_waits_for_the_step"], "a step that the host has begun is finished before the save"
    assert seen["in_save"] == [14, 14, 14, 14, 0]
    assert seen["parked"], "the next step waits for the resume"
    assert seen["held"]["rest"] == "idle"
    assert (seen["word_before"], seen["word_after"]) == (0, 2**63 + 5)
    assert seen["area_before"] == [0]
    assert seen["area_after"] == [[2**63 + 6, 2**63 + 6], [7]]


def test_back_pressure_gives_way_to_a_save(run_program: Callable[..., Any]) -> None:
    assert run_program("run_ahead") == {"parked": True}


@pytest.mark.parametrize(("calls", "place"), [("single", "first call"), ("group", "end of the group")])
def test_a_rehearsed_failure_comes_right_after_the_next_nccl_call(
    run_program: Callable[..., Any], calls: str, place: str
) -> None:
    assert run_program("fault", calls) == {"caught": [place]}
