"""A job of which two halves went on at once is found out; one that only failed again and again is not."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from campaign import halves
from campaign.halves import Directory, Noted, SeenSave
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.events import Event, EventLog
from jitckpt.saves import layout, starts
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.saves.starts import Start

RANKS = 2


@dataclass
class History:
    """A job with one checkpoint directory, as its agents and ranks write it down."""

    numbered: bool
    starts: list[Noted] = field(default_factory=list)
    log: list[Event] = field(default_factory=list)
    saves: list[SeenSave] = field(default_factory=list)
    made: list[SeenSave] = field(default_factory=list)  # also those that were set aside

    def tell(self, number: int, event: str, **details: Any) -> None:
        """Write an event of the start of this number, from 1."""
        line = {"event": event, "time": 1.0, "clock": 1.0, "restart": number - 1} | details
        self.log.append(line | ({"start": number} if self.numbered else {}))

    def begin(self, base: int, source: SeenSave | None) -> int:
        """Begin the next start, which goes on from a step, and return its number."""
        number = len(self.starts) + 1
        self.tell(number, "restart" if number > 1 else "job_started")
        self.starts.append(Noted(number, 10 * number, base))
        self.saves = [saved for saved in self.saves if saved.step <= base]
        for rank in range(RANKS):
            if source is not None:
                self.tell(number, "restored", rank=rank, step=base, path=source.path)
            self.tell(number, "first_step", rank=rank, step=base + 1)
        return number

    def save(self, number: int, step: int, rank: int) -> None:
        path = f"step-{step}/rank-{rank}"
        self.saves = [saved for saved in self.saves if saved.path != path]
        self.saves.append(SeenSave(number if self.numbered else 0, step, rank, path))
        self.made.append(self.saves[-1])
        self.tell(number, "save_ended", rank=rank, step=step, path=path)

    @property
    def directory(self) -> Directory:
        noted = self.starts if self.numbered else []
        return Directory(list(noted), list(self.log), list(self.saves))


@st.composite
def healthy(draw: st.DrawFn, least: int = 0, numbered: bool | None = None) -> History:
    """A job whose starts go on from a save that is there; some ranks save at the end of each."""
    history = History(draw(st.booleans()) if numbered is None else numbered)
    for _ in range(draw(st.integers(least, 6))):
        source = draw(st.sampled_from([None, *history.saves]))
        base = 0 if source is None else source.step
        number = history.begin(base, source)
        step = base + draw(st.integers(1, 5))
        for rank in draw(st.sets(st.integers(0, RANKS - 1))):
            history.save(number, step, rank)
        history.tell(number, "detected")
    return history


def signs(*histories: History) -> list[str]:
    return halves.found([history.directory for history in histories])


@given(healthy())
def test_a_job_that_fails_again_and_again_shows_no_sign(history: History) -> None:
    assert signs(history) == []


@given(healthy(numbered=False), healthy(numbered=False))
def test_a_run_after_another_shows_none(history: History, again: History) -> None:
    """Without numbers: with them, the second run's are higher."""
    history.log += again.log
    assert signs(history) == []


@given(st.data(), healthy(least=1))
def test_two_halves_with_one_directory(data: st.DataObject, history: History) -> None:
    """The half that was cut off makes steps, and saves, when the other has gone on from an earlier one."""
    behind = len(history.starts)
    history.begin(0, None)
    history.save(behind, data.draw(st.integers(1, 20)), data.draw(st.integers(0, RANKS - 1)))
    found = signs(history)
    assert f"{'start' if history.numbered else 'restart'} {behind - (not history.numbered)}" in found[0]


@given(st.data(), healthy(least=1))
def test_two_halves_with_a_directory_each(data: st.DataObject, history: History) -> None:
    """Each thinks that it is the next start."""
    other = replace(history, starts=list(history.starts), log=[], saves=list(history.saves))
    history.begin(0, None)
    other.begin(0, None)
    assert any(
        "rank 0 went on 2 times" in sign for sign in halves.found([history.directory, other.directory])
    )


@given(healthy(least=1, numbered=True))
def test_two_starts_with_one_number(history: History) -> None:
    last = history.starts[-1]
    other = Directory([replace(last, revision=last.revision + 1)], [], [])
    (sign,) = halves.found([history.directory, other])
    assert sign.startswith(f"there are several starts {last.number}: revision")
    elsewhere = Directory([replace(last, went_on_from=99)], [], [])
    assert "from step" in halves.found([history.directory, elsewhere])[0]


@given(st.data(), healthy(least=1, numbered=True))
def test_a_save_that_landed_late(data: st.DataObject, history: History) -> None:
    """Nobody tells of it: the agent's events were refused."""
    behind = len(history.starts)
    base = history.starts[-1].went_on_from or 0
    history.begin(base, None)
    history.saves.append(SeenSave(behind, base + data.draw(st.integers(1, 20)), 0, "late"))
    (sign,) = signs(history)
    assert sign.startswith(f"start {behind} has saved step")
    assert halves.found([replace(history.directory, set_aside=False)]) == []


@given(st.data(), healthy(least=1, numbered=True))
def test_a_state_that_was_left_behind_and_comes_back(data: st.DataObject, history: History) -> None:
    base = history.starts[-1].went_on_from or 0
    history.save(len(history.starts), base + data.draw(st.integers(1, 9)), 0)
    source = history.made[-1]
    history.begin(base, None)
    history.begin(source.step, source)
    found = signs(history)
    assert len(found) == RANKS
    assert f"has gone on from step {source.step} of start {source.start}" in found[0]


def write_save(root: Path, identity: Identity, step: int) -> None:
    """Write a save as if nothing fenced anybody off."""
    with SaveFolder(root, identity, step, "rank", "builtin", start=0) as folder:
        folder.add_json(layout.STATE_FILE, {})
        folder.commit()


@pytest.mark.parametrize("is_split", [False, True])
def test_a_real_directory_is_read(tmp_path: Path, is_split: bool) -> None:
    for number, base in ((1, 0), (2, 10)):
        log = EventLog(tmp_path)
        log.start, log.restart = number, number - 1
        starts.note_begun(tmp_path, Start(number, 7 * number))
        starts.note_going_on(tmp_path, number, base)
        log.write("restart")
        log.write("first_step", rank=0, step=base + 1)
        write_save(tmp_path, Identity("j", "f", 1, 0, 0, 1, start=number), base + 10)
    if is_split:
        write_save(tmp_path, Identity("j", "f", 1, 0, 0, 1, start=1), 13)
    found = halves.found(halves.read([tmp_path, tmp_path / "nothing"]))
    path = "step-0000000013/rank-00000"
    late = f"start 1 has saved step 13 of rank 0 ({path}) after start 2 had gone on from step 10"
    assert found == [late] * is_split
