"""Who keeps the others waiting and has a reason is a straggler; who does so for ever has failed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jitckpt.rehearsal.runs import OUTPUT, Run, run_job

TRAINING = Path(__file__).parent / "patience.py"
REASONS = ("first iteration", "compilation", "data", "evaluation", "periodic save")


@dataclass(frozen=True)
class Waited:
    run: Run
    said: str
    pauses: dict[str, list[Any]]  # by reason: rank, when it began and ended
    report: str


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Waited:
    folder = tmp_path_factory.mktemp("patience") / "job"
    options = ["--warm-spares", "0", "--warm-start", "--stall-timeout", "10"]
    run = run_job([*options, str(TRAINING)], folder, hang_timeout=1)
    pauses = [json.loads(line) for line in (folder / "pauses").read_text().splitlines()]
    (report,) = folder.glob("ckpt/hang-0-*.txt")
    by_reason = {reason: rest for reason, *rest in pauses}
    return Waited(run, (folder / OUTPUT).read_text(), by_reason, report.read_text())


@pytest.mark.parametrize("reason", REASONS)
def test_it_is_no_failure(waited: Waited, reason: str) -> None:
    rank, began, ended = waited.pauses[reason]
    during = [event for event in waited.run.events if began <= event["clock"] <= ended]
    assert [rank] in [event["ranks"] for event in during if event["event"] == "straggler"]
    assert [event for event in during if event["event"] in ("detected", "save_ordered")] == []


def test_only_the_wait_for_ever_is_a_failure(waited: Waited) -> None:
    assert waited.run.status == 0, waited.said
    assert waited.run.left_behind == ()
    (recovery,) = waited.run.recoveries
    assert (recovery.step, recovery.redone) == (11, 1)
    assert "of ranks 0 to 1 along replicas, where rank 1 has not arrived" in recovery.cause
    assert recovery.cause in waited.report
    assert "Python stacks of rank 1:" in waited.report
    assert "in wait_for_ever" in waited.report
