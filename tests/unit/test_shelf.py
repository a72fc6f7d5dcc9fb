"""The snapshots of a lost job: whole ones of this very job are found, and nothing else."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.pages import PAGE
from jitckpt.agent.migration.shelf import PAGES, DamagedSnapshot, ProcessSnapshot, Shelf, Size, images_of
from jitckpt.bindings import holes

JOB: dict[str, Any] = {
    "command": ["python", "train.py"],
    "folder": "/",
    "files": {},
    "ranks": 1,
    "place": [0, 1],
    "devices": ["0"],
    "user": 0,
    "versions": {},
    "kernel": "6",
    "processor": [],
}


def page(word: str) -> bytes:
    """Return a page that begins with the word."""
    return word.encode().ljust(PAGE, b".")


def put(shelf: Shelf, step: int, pages: str = "a b", *, in_memory: bool = True, called: str = "one") -> Size:
    """Put a snapshot of one rank there; return its size."""
    draft = shelf.begin(step, in_memory=in_memory)
    content = {"core-7.img": b"registers", "pages-1.img": b"".join(map(page, pages.split()))}
    for name, data in content.items():
        with open(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=draft.of(0)), "wb") as file:
            file.write(data)
    ends: list[tuple[Size, OSError | None]] = []
    shelf.put(
        draft, {"step": step, "name": called, "ranks": []}, lambda size, error: ends.append((size, error))
    )
    shelf.settle()
    ((size, error),) = ends
    assert error is None
    return size


def pages_of(folder: Path) -> list[Path]:
    """Return the files of pages, those of the oldest snapshot first."""
    return sorted((folder / PAGES).iterdir(), key=lambda path: path.stat().st_mtime_ns)


def pass_over_newest(shelf: Shelf) -> None:
    assert shelf.newest is not None
    shelf.pass_over(shelf.newest)


def read(snapshot: ProcessSnapshot | None) -> tuple[int, str]:
    """Return the step of a snapshot, and its pages' words."""
    assert snapshot is not None
    with images_of(snapshot) as (plan, folders):
        data = Path(f"/proc/self/fd/{folders[0]}/pages-1.img").read_bytes()
        assert Path(f"/proc/self/fd/{folders[0]}/core-7.img").read_bytes() == b"registers"
    return plan["step"], " ".join(data.decode().replace(".", " ").split())


def test_another_launcher_of_the_job_finds_what_was_left(tmp_path: Path) -> None:
    first = Shelf(tmp_path, JOB)
    put(first, 8)
    (tmp_path / "unfinished-snapshot-0000000012").mkdir()  # it was killed while it wrote
    second = Shelf(tmp_path, JOB)
    assert second.newest is not None
    assert (second.newest.step, second.refused, second.mark) == (8, [], first.mark)
    assert read(second.newest) == (8, "a b")
    assert second.newest.path.stat().st_mode & 0o777 == 0o700
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
    image.write_bytes(b"Registers")
    newest = Shelf(tmp_path, JOB).newest
    assert newest is not None
    with pytest.raises(DamagedSnapshot, match=r"core-7\.img is not what was written"):
        read(newest)


def test_what_is_of_no_use_now_stays_for_another_launcher(tmp_path: Path) -> None:
    put(Shelf(tmp_path, JOB), 8)
    shelf = Shelf(tmp_path, JOB)
    assert shelf.newest is not None
    shelf.pass_over(shelf.newest)
    assert shelf.newest is None
    assert Shelf(tmp_path, JOB).newest is not None
    shelf.forget()
    assert Shelf(tmp_path, JOB).newest is None


def test_what_two_have_is_there_once_and_what_none_has_goes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, JOB)
    first = put(shelf, 4, "a b c d a")
    (first_file,) = pages_of(tmp_path)
    assert (first.images, first.stored) == (5 * PAGE + 9, 4 * PAGE + 9)
    assert put(shelf, 8, "a x c b a").stored == PAGE + 9
    disk = put(shelf, 12, "x a y").disk
    assert [path.name for path in sorted(tmp_path.glob("snapshot-*"))] == [
        f"snapshot-{step:010}" for step in (8, 12)
    ]
    assert first_file.read_bytes() == b"".join(map(page, ["a", "b", "c"])) + bytes(PAGE), (
        "nobody has d any more"
    )
    assert disk >= 5 * PAGE
    assert read(shelf.newest) == (12, "x a y")
    pass_over_newest(shelf)
    assert read(shelf.newest) == (8, "a x c b a")


def test_one_that_is_damaged_leaves_the_one_before(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, JOB)
    put(shelf, 4, "a b")
    put(shelf, 8, "a x")
    pages = pages_of(tmp_path)[1]
    pages.write_bytes(pages.read_bytes().replace(b"x", b"y"))
    with pytest.raises(DamagedSnapshot, match=r"rank-0/pages-1\.img is not what was written"):
        read(shelf.newest)
    pass_over_newest(shelf)
    assert read(shelf.newest) == (4, "a b")
    assert put(shelf, 8, "a x").stored == 2 * PAGE + 9, "nothing is taken from what may be damaged"
    newest = max(pages_of(tmp_path), key=lambda path: path.stat().st_ctime_ns)
    newest.unlink()
    pass_over_newest(shelf)
    assert read(shelf.newest) == (4, "a b")


def test_without_memory_for_it_one_is_stored_as_it_is(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, JOB)
    put(shelf, 4, "a b")
    assert put(shelf, 8, "a b", in_memory=False).stored == 2 * PAGE + 9
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-0000000008"]
    assert read(shelf.newest) == (8, "a b")
    (image,) = tmp_path.glob("*/rank-0/pages-1.img")
    image.write_bytes(image.read_bytes().replace(b"a", b"b"))
    with pytest.raises(DamagedSnapshot, match=r"pages-1\.img is not what was written"):
        read(shelf.newest)


def test_where_files_have_no_holes_nothing_is_taken_from_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_holes(file: int, at: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes")

    monkeypatch.setattr(holes, "punch", no_holes)
    shelf = Shelf(tmp_path, JOB)
    put(shelf, 4, "a b")
    put(shelf, 8, "a x")
    assert put(shelf, 12, "a x").stored == 9
    assert put(shelf, 16, "a x").stored == 2 * PAGE + 9
    put(shelf, 20, "a x")
    assert sum(path.stat().st_size for path in (tmp_path / PAGES).iterdir()) == 4 * PAGE
    assert read(shelf.newest) == (20, "a x")


def test_all_of_a_job_that_has_ended_goes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, JOB)
    put(shelf, 4)
    shelf.forget()
    assert list(tmp_path.iterdir()) == []


def test_where_memory_is_short_images_are_put_together_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looked_at, "available_memory", lambda: 2 * PAGE)
    shelf = Shelf(tmp_path, JOB)
    put(shelf, 4)
    before = sorted(os.listdir(tmp_path))
    assert read(shelf.newest) == (4, "a b")
    assert sorted(os.listdir(tmp_path)) == before


def test_on_several_hosts_the_one_before_stays_until_all_have_the_next(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, JOB, several="mark")
    put(shelf, 4, "a b", called="first")
    assert (shelf.step, shelf.named) == (None, [(4, "first")])
    shelf.all_have()
    assert (shelf.step, shelf.mark) == (4, "mark")
    put(shelf, 8, "a x", called="second")
    put(shelf, 8, "a x", called="second")
    assert shelf.named == [(4, "first"), (8, "second")]
    shelf.not_all_have()
    assert shelf.named == [(4, "first")]
    assert [path.name for path in tmp_path.glob("snapshot-*")] == ["snapshot-0000000004"]
    assert read(shelf.newest) == (4, "a b")


def test_of_what_a_host_has_only_that_counts_which_all_have(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, JOB, several="mark")
    put(shelf, 4, "a b", called="first")
    shelf.all_have()
    put(shelf, 8, "a x", called="second")
    again = Shelf(tmp_path, JOB, several="another")
    assert again.named == [(4, "first"), (8, "second")]
    again.agree_on([(4, "first"), (8, "of another run")])
    assert (again.step, again.mark) == (4, "another")
    put(again, 12, "a y", called="third")
    again.agree_on([(12, "third")])
    assert read(again.newest) == (12, "a y")
    again.all_have()
    assert again.named == [(12, "third")]


def test_nothing_is_taken_from_one_that_not_all_hosts_had(tmp_path: Path) -> None:
    """Its pages have gone with it."""
    shelf = Shelf(tmp_path, JOB, several="mark")
    put(shelf, 4, "a b", called="first")
    shelf.all_have()
    put(shelf, 8, "a x", called="second")
    shelf.not_all_have()
    put(shelf, 12, "a x", called="third")
    shelf.all_have()
    assert read(shelf.newest) == (12, "a x")


def test_nothing_is_taken_from_one_that_was_not_gone_back_to(tmp_path: Path) -> None:
    """Another host had lost it; it goes as the one before it has copies."""
    shelf = Shelf(tmp_path, JOB, several="mark")
    for step, pages in ((4, "a b"), (8, "a x")):
        put(shelf, step, pages, called=f"{step}")
        shelf.all_have()
    shelf.agree_on([(4, "4")])
    shelf.begin_copying((4, "4"))
    shelf.end_copying((4, "4"), made=True)
    assert [path.name for path in tmp_path.glob("snapshot-*")] == ["snapshot-0000000004"]
    put(shelf, 12, "a x", called="12")
    shelf.all_have()
    assert read(shelf.newest) == (12, "a x")
