"""Who was cut off, and finds that a later start of the job has begun, writes and removes nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.errors import SaveError
from jitckpt.events import EventLog, read_events
from jitckpt.saves import folders, layout, start_record, starts
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.saves.starts import Start, Starts, Superseded

FIRST = Identity("j", "f", 1, 0, 0, 1, start=1)
SECOND = replace(FIRST, start=2)


def save(root: Path, identity: Identity, step: int, *, start: int | None = None) -> Path:
    """Write a save; start: 0 for one that does not look whether others have gone on."""
    with SaveFolder(root, identity, step, "rank", "builtin", start=start) as folder:
        folder.add_tensors(layout.TENSORS_FILE, {"weight": torch.ones(2)})
        folder.add_json(layout.STATE_FILE, {"by": identity.start})
        return folder.commit()[0]


def go_on(root: Path, number: int, step: int) -> None:
    starts.note_begun(root, Start(number, 100 + number))
    starts.note_going_on(root, number, step)


def usable(root: Path) -> list[tuple[int, int]]:
    """Return start and step of each save that counts."""
    found = [record.metadata for record in folders.find(root)]
    return [(one.identity.start, one.step) for one in found if one is not None]


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_job_whose_starts_have_no_numbers_notes_nothing(tmp_path: Path) -> None:
    starts.note_begun(tmp_path, Start())
    starts.note_going_on(tmp_path, 0, 5)
    save(tmp_path, replace(FIRST, start=0), 7)
    assert starts.read(tmp_path) == Starts(0, {})
    assert not (tmp_path / starts.FOLDER).exists()
    assert usable(tmp_path) == [(0, 7)]


def test_a_start_goes_as_text_to_the_ranks() -> None:
    assert Start.parse(str(Start(7, 12))) == Start(7, 12)
    assert Start.parse(str(Start())) == Start()


def test_who_was_cut_off_saves_and_removes_nothing(tmp_path: Path) -> None:
    folders.open_directory(tmp_path)
    go_on(tmp_path, 1, 0)
    for step in (5, 10):
        save(tmp_path, FIRST, step)
    before = contents(tmp_path)
    with SaveFolder(tmp_path, FIRST, 10, "rank", "builtin") as folder:
        folder.add_json(layout.STATE_FILE, {})  # stopped here, while the others go on
        go_on(tmp_path, 2, 10)
        with pytest.raises(Superseded, match=r"start 2 has begun in .*, and this is start 1\. Nothing is"):
            folder.commit()
    notes = {path: data for path, data in contents(tmp_path).items() if path.name.startswith("start-")}
    assert contents(tmp_path) == before | notes
    before = contents(tmp_path)
    with pytest.raises(Superseded):
        save(tmp_path, FIRST, 11)
    with pytest.raises(Superseded):
        folders.KeptSaves(tmp_path, FIRST).remove_old(keep=1)
    with pytest.raises(Superseded):
        folders.remove_before(tmp_path, 10, FIRST)
    with pytest.raises(Superseded):
        folders.set_aside_after(tmp_path, 5, 0, start=1)
    with pytest.raises(Superseded):
        start_record.note_start(tmp_path, {"arguments": "x"}, 1)
    with pytest.raises(Superseded):
        start_record.note_finished(tmp_path, 1)
    assert contents(tmp_path) == before
    folders.KeptSaves(tmp_path, SECOND).remove_old(keep=1)
    start_record.note_finished(tmp_path, 2)
    assert usable(tmp_path) == [(1, 10)]


def test_two_starts_write_the_same_save_in_folders_of_their_own(tmp_path: Path) -> None:
    """A process that wakes in the middle of its save spoils nothing that a later one is writing."""
    with SaveFolder(tmp_path, FIRST, 3, "rank", "builtin") as old:
        old.add_json(layout.STATE_FILE, {"by": 1})
        go_on(tmp_path, 2, 0)
        with SaveFolder(tmp_path, SECOND, 3, "rank", "builtin") as new:
            new.add_json(layout.STATE_FILE, {"by": 2})
            with pytest.raises(Superseded):
                old.commit()
            new.commit()
    assert usable(tmp_path) == [(2, 3)]
    assert [folders.verify(record) for record in folders.find(tmp_path)] == [None]
    with SaveFolder(tmp_path, SECOND, 4, "rank", "builtin", by="periodic") as left:
        folders.clear_leftovers(tmp_path, 0)
        assert not left.path.exists()


def test_what_lands_all_the_same_is_no_save_of_the_job(tmp_path: Path) -> None:
    """It is neither gone on from nor counted when old saves are removed, and is set aside at a restart."""
    go_on(tmp_path, 1, 0)
    save(tmp_path, FIRST, 10)
    go_on(tmp_path, 2, 10)
    save(tmp_path, SECOND, 15)
    save(tmp_path, FIRST, 20, start=0)
    late = folders.find(tmp_path)[0]
    assert late.problem == f"{late.path} is of start 1, but start 2 of the job has gone on from step 10."
    assert not late.finished
    assert usable(tmp_path) == [(2, 15), (1, 10)]
    folders.KeptSaves(tmp_path, SECOND).remove_old(keep=1)
    assert usable(tmp_path) == [(2, 15)]
    folders.set_aside_after(tmp_path, 15, 0, start=2)
    assert [record.step for record in folders.find(tmp_path)] == [15]


def test_an_earlier_start_than_one_that_is_noted_does_not_begin(tmp_path: Path) -> None:
    starts.note_begun(tmp_path, Start(2, 9))
    starts.note_begun(tmp_path, Start(2, 9))  # by another rank
    with pytest.raises(Superseded, match="start 2 has begun"):
        starts.note_begun(tmp_path, Start(1, 5))
    with pytest.raises(Superseded, match=r"revision 9 instead of 4.*--checkpoint-dir"):
        starts.note_begun(tmp_path, Start(2, 4))
    assert starts.revisions(tmp_path) == {2: 9}


def test_a_start_that_never_went_on_left_nothing_behind(tmp_path: Path) -> None:
    go_on(tmp_path, 1, 0)
    save(tmp_path, FIRST, 5)
    starts.note_begun(tmp_path, Start(2, 8))
    assert usable(tmp_path) == [(1, 5)]


def test_the_first_step_that_a_start_goes_on_from_counts(tmp_path: Path) -> None:
    """A job on one host starts its ranks again without another meeting."""
    go_on(tmp_path, 1, 5)
    starts.note_going_on(tmp_path, 1, 9)
    assert starts.read(tmp_path) == Starts(1, {1: 5})


def test_what_other_hosts_know_is_noted_in_a_directory_of_ones_own(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    starts.note_of_others(root, [(3, 20), (2, 10)])
    assert starts.read(root) == Starts(3, {2: 10, 3: 20})
    starts.note_begun(root, Start(4, 50))


def test_events_of_a_start_that_was_cut_off_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = EventLog(tmp_path), EventLog(tmp_path)
    for number, log in enumerate((old, new), start=1):
        starts.note_begun(tmp_path, Start(number, number))
        log.superseded, log.start = starts.is_superseded, number
        log.write("restart")
        old.write("detected")
        old.write("detected")
    assert [(event["event"], event["start"]) for event in read_events(tmp_path)[0]] == [
        ("restart", 1),
        ("detected", 1),
        ("detected", 1),
        ("restart", 2),
    ]
    assert capsys.readouterr().err.count("the job has gone on without this host") == 1
    old.start = 2  # it takes part again
    old.write("finished")
    assert read_events(tmp_path)[0][-1]["event"] == "finished"


def test_what_a_save_says_of_its_start_is_read_again_or_refused() -> None:
    made = layout.Metadata(FIRST, "rank", "builtin", 3, 1.0, ())
    assert layout.parse_metadata(made.to_json()) == made
    document = json.loads(made.to_json())
    del document["checksum"]
    for start in (-1, "1", 1.0):
        document["identity"]["start"] = start
        with pytest.raises(SaveError):
            layout.parse_metadata(layout.with_checksum(document))
    del document["identity"]["start"]  # of an earlier jitckpt
    assert layout.parse_metadata(layout.with_checksum(document)).identity.start == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), max_size=8))
def test_a_state_counts_exactly_if_the_job_has_passed_through_it(
    tries: list[tuple[float, int]],
) -> None:
    """Each start goes on from some step that the job had come to, and makes so many more."""
    passed: list[int] = []  # by step, from 1: the start that made it
    bases: dict[int, int] = {}
    made: set[tuple[int, int]] = set()
    for number, (part, more) in enumerate(tries, start=1):
        bases[number] = round(part * len(passed))
        passed = passed[: bases[number]] + more * [number]
        made |= {(number, bases[number] + one) for one in range(1, more + 1)}
    known = Starts(len(tries), bases)
    for number, step in made:
        counts = step <= len(passed) and passed[step - 1] == number
        assert (known.problem(number, step) is None) == counts
