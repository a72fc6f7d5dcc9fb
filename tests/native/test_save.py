"""What happens to the host's and the save's device calls while a save is ordered."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BUSY_SAVES = int(os.environ.get("JITCKPT_BUSY_SAVES", "4"))


def test_all_copies_go_through_while_the_default_stream_is_blocked(run_program: Callable[..., Any]) -> None:
    seen = run_program("copies_in_save")
    results = seen["results"]
    assert results["order"] == {"type": "save", "save_id": 3}
    for kind in ("pageable", "pinned"):
        assert len(results[kind]) == 10
        assert [name for name, right in results[kind].items() if not right] == [], kind
    assert seen["held"]["save_id"] == 3
    assert seen["held"]["rest"] == "settled", "the blocked stream is not idle"
    assert seen["holding"]
    assert seen["parked"], "a host thread's call waits until the resume"
    assert seen["after"], "and then takes place"


def test_a_host_that_runs_ahead_of_a_device_that_hangs_keeps_no_save_away(
    run_program: Callable[..., Any],
) -> None:
    """A stream's queue that is full blocks every other call of the process, as on a GPU."""
    seen = run_program("full_queue", "256", "240")
    assert seen["saved"] == 0x01010101
    assert seen["came"] < 300
    unlimited = run_program("full_queue", "0", "1020")
    assert unlimited["saved"] is None, "the device under test is as a GPU in this"
    assert unlimited["came"] == 1020


@pytest.mark.parametrize("where", ["device_call", "foreign_call", "gate"])
def test_the_gil_is_had_from_a_thread_that_hangs(run_program: Callable[..., Any], where: str) -> None:
    seen = run_program("gil_held", where)
    assert seen["order"] == {"type": "save", "save_id": 5}
    assert seen["counted"] == 1000, "the thread has gone on after the resume"
    assert seen["holding"] == 0


@pytest.mark.parametrize("work", ["collection", "sort", "allocation"])
def test_the_gil_is_not_had_from_a_thread_in_the_middle_of_the_interpreters_own_work(
    run_program: Callable[..., Any], work: str
) -> None:
    """It crashed: others changed what a garbage collection was looking at, or were given the same memory.

    More by command: JITCKPT_BUSY_SAVES=1000 pytest tests/native/test_save.py -k middle --timeout 0
    """
    seen = run_program("busy_holder", work, str(BUSY_SAVES), limit=100 + 10 * BUSY_SAVES)
    assert seen["saves"] == BUSY_SAVES


def test_collectives_are_refused_by_name_inside_a_save(run_program: Callable[..., Any]) -> None:
    seen = run_program("refused")["seen"]
    invalid_usage = 5
    for call, name in {
        "all_reduce": "ncclAllReduce",
        "send": "ncclSend",
        "abort": "ncclCommAbort",
        "split": "ncclCommSplit",
    }.items():
        result, text = seen[call]
        assert result == invalid_usage
        assert text == (
            f"{name} was called inside save_checkpoint: "
            "no collective may run there, the other ranks can't answer"
        )


def test_a_false_alarm_goes_on_correctly(run_program: Callable[..., Any]) -> None:
    seen = run_program("false_alarm")
    assert seen["in_save"] == [1.0] * 64, "the save saw the state from before the collective"
    # The memset that was held came after the all-reduce, in the default stream's order.
    assert seen["result"] == [0.0] + [1.0 + index for index in range(1, 64)]
    assert [h["sequence"] for h in seen["hangs"]] == [1, 1]


def test_a_process_that_ends_lets_its_save_end_first(run_program: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "saved"
    run_program("exit_in_save", str(file), status=5)
    assert file.read_text() == "whole"


def test_the_save_runs_on_the_device_of_the_job(run_program: Callable[..., Any]) -> None:
    assert run_program("saver_device") == {"device": 1}
