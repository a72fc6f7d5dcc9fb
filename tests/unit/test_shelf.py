"""The snapshots of a lost job: whole ones of this very job are found, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from jitckpt.agent.migration.shelf import DamagedSnapshot, Shelf, plan_of

JOB: dict[str, Any] = {
    "command": ["python", "train.py"],
    "folder": "/",
    "files": {},
    "ranks": 1,
    "devices": ["0"],
    "user": 0,
    "versions": {},
    "kernel": "6",
    "processor": [],
}


def put(shelf: Shelf, step: int, content: bytes = b"pages") -> None:
    """Put a snapshot of one rank there."""
    draft = shelf.begin(step, in_memory=False)
    draft.of(0)
    for name in ("core-7.img", "pages-1.img"):
        (draft.path / "rank-0" / name).write_bytes(content)
    errors: list[OSError | None] = []
    shelf.put(draft, {"step": step, "ranks": []}, lambda _, error: errors.append(error))
    shelf.settle()
    assert errors == [None]


def test_another_launcher_of_the_job_finds_what_was_left(tmp_path: Path) -> None:
    first = Shelf(tmp_path, JOB)
    put(first, 8)
    (tmp_path / "unfinished-snapshot-0000000012").mkdir()  # it was killed while it wrote
    second = Shelf(tmp_path, JOB)
    assert second.newest is not None
    assert (second.newest.step, second.refused, second.mark) == (8, [], first.mark)
    assert plan_of(second.newest)["step"] == 8
    assert list(tmp_path.glob("unfinished*")) == []


def test_another_job_leaves_it_until_it_has_one_of_its_own(tmp_path: Path) -> None:
    put(Shelf(tmp_path, JOB), 8)
    other = Shelf(tmp_path, {**JOB, "ranks": 2})
    assert other.newest is None
    ((snapshot, sentence),) = other.refused
    assert sentence == "It is of a job of another number of ranks (1, and here it is 2)."
    assert snapshot.path.exists()
    put(other, 4)
    assert not snapshot.path.exists()
    assert Shelf(tmp_path, JOB).newest is None


def test_a_plan_that_is_damaged_is_no_snapshot(tmp_path: Path) -> None:
    put(Shelf(tmp_path, JOB), 8)
    (plan,) = tmp_path.glob("snapshot-*/plan.json")
    told = json.loads(plan.read_text())
    plan.write_text(json.dumps({**told, "plan": told["plan"].replace('"step": 8', '"step": 9')}))
    shelf = Shelf(tmp_path, JOB)
    assert shelf.newest is None
    assert shelf.refused[0][1] == f"{plan} is not what was written."


def test_an_image_that_is_damaged_is_seen_before_it_is_used(tmp_path: Path) -> None:
    put(Shelf(tmp_path, JOB), 8)
    (image,) = tmp_path.glob("snapshot-*/rank-0/core-7.img")
    image.write_bytes(b"Pages")
    newest = Shelf(tmp_path, JOB).newest
    assert newest is not None
    with pytest.raises(DamagedSnapshot, match=r"core-7\.img is not what was written"):
        plan_of(newest)


def test_what_is_of_no_use_now_stays_for_another_launcher(tmp_path: Path) -> None:
    put(Shelf(tmp_path, JOB), 8)
    shelf = Shelf(tmp_path, JOB)
    assert shelf.newest is not None
    shelf.pass_over(shelf.newest)
    assert shelf.newest is None
    assert Shelf(tmp_path, JOB).newest is not None
    shelf.forget()
    assert Shelf(tmp_path, JOB).newest is None
