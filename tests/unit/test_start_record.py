"""What a start says of the job that it goes on with."""

import json
import sys
from pathlib import Path

import pytest
import torch

from jitckpt.saves import folders, start_record

FIRST = {"arguments": "train.py --steps 5", "optimizer": "SGD(lr=0.1)", "random seed": "1"}


@pytest.mark.parametrize(
    ("ranks", "shards", "said"),
    [
        (1, 1, "1 rank, the whole state; saves go to ckpt."),
        (2, 1, "2 ranks, 2 copies of the state; saves go to ckpt."),
        (4, 4, "4 ranks, 4 shards of the state, 1 copy of each; saves go to ckpt."),
        (8, 4, "8 ranks, 4 shards of the state, 2 copies of each; saves go to ckpt."),
    ],
)
def test_every_start_says_how_often_the_state_is_there(ranks: int, shards: int, said: str) -> None:
    assert start_record.who_is_there(ranks, shards, Path("ckpt")) == said


def test_a_start_says_where_it_goes_on_and_what_differs(tmp_path: Path) -> None:
    job = folders.open_directory(tmp_path)
    start_record.note_start(tmp_path, FIRST)
    assert folders.open_directory(tmp_path) == job
    (same,) = start_record.told(tmp_path, 5, 0.0, job, FIRST)
    assert same.startswith("goes on from step 5, saved at 19")
    assert f"by job {job} in {tmp_path}" in same
    now = FIRST | {"optimizer": "SGD(lr=0.2)", "random seed": "2"}
    _, differs = start_record.told(tmp_path, 5, 0.0, job, now)
    assert "optimizer SGD(lr=0.2) (was SGD(lr=0.1)); random seed 2 (was 1). It goes on from step 5" in differs


def test_a_job_that_has_ended_is_named_until_it_begins_again(tmp_path: Path) -> None:
    job = folders.open_directory(tmp_path)
    start_record.note_finished(tmp_path)
    _, ended = start_record.told(tmp_path, 5, 0.0, job, FIRST)
    assert "that job has ended successfully" in ended
    start_record.note_start(tmp_path, FIRST)
    assert len(start_record.told(tmp_path, 5, 0.0, job, FIRST)) == 1


@pytest.mark.parametrize("start", [None, [], "x", {"optimizer": 3}])
def test_what_an_older_or_another_jitckpt_has_noted_is_passed_over(tmp_path: Path, start: object) -> None:
    (tmp_path / "job.json").write_text(
        json.dumps({"format": 2, "job": "j", "start": start, "finished": "no"})
    )
    assert len(start_record.told(tmp_path, 5, 0.0, "j", FIRST)) == 1


def test_settings_are_what_the_optimizer_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--name", "a b"])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    first = start_record.settings([optimizer])
    optimizer.param_groups[0]["lr"] = 0.01  # as a scheduler does
    assert start_record.settings([optimizer]) == first
    assert first["arguments"] == "train.py --name 'a b'"
    assert "lr=0.1" in first["optimizer"]
