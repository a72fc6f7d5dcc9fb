"""A host that has lost its part of a snapshot has it from another one before all go back."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_held_copies import HOSTS, One, hosts, lose_disk
from test_kept_snapshots import STORE, made_again
from test_shelf import JOB, pages_of, read

from jitckpt.agent.migration import going_back, lost_job
from jitckpt.agent.migration.all_made_again import AllMadeAgain
from jitckpt.agent.migration.going_back import NotMadeAgain
from jitckpt.agent.migration.held_copies import FOLDER
from jitckpt.agent.migration.kept_snapshots import KeptSnapshots
from jitckpt.agent.migration.part_copier import fetch
from jitckpt.agent.migration.shelf import DamagedSnapshot, ProcessSnapshot
from jitckpt.errors import HostBeginsAgain
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived
from jitckpt.wire import agents

__all__ = ["hosts", "made_again"]

STEPS = (4, 12)  # those of 8 can't be gone back to


@pytest.fixture(autouse=True)
def free_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_job, "where_to_count_from", lambda directory: None)


@pytest.fixture
def lost(hosts: list[One]) -> list[One]:
    """All hosts' parts of two snapshots are on two others each; the first has lost its disk."""
    for step in STEPS:
        for one in hosts:
            one.put(step, f"a b {step}")
        for one in hosts:
            assert one.copy(step, copies=2)[0] == ""
    lose_disk(hosts[0])
    return hosts


def launched(hosts: list[One], job: Any = JOB) -> KeptSnapshots:
    """Return what the first host's new launcher has, once all have met."""
    found: Any = None
    made = KeptSnapshots(
        hosts[0].directory, found, EventLog(), hold=lambda folder: None, whose=lambda place: job, copies=2
    )
    made.mark = "mark"
    made.take_place((0, HOSTS))
    others = [one.shelf.named for one in hosts[1:]]
    made.agree([made.named, *others], [made.copied, *(one.held.held for one in hosts[1:])], 0)
    return made


def go_back(made: KeptSnapshots, hosts: list[One]) -> int | None:
    """Go back as all others can; return the step."""
    over = threading.Event()

    def answer() -> None:
        while not over.wait(0.01):
            for one in hosts[1:]:
                for arrived in one.hosts.take():
                    match arrived:
                        case Arrived(0, agents.RanksMadeAgain(name)):
                            one.hosts.send(0, agents.RanksMadeAgain(name, ""))

    others = threading.Thread(target=answer)
    others.start()
    try:
        together = AllMadeAgain(hosts[0].hosts, lambda: False)
        again = made.go_back(STORE, [], is_first=True, together=together)
    finally:
        over.set()
        others.join()
    return None if again is None else again.step


def test_the_newest_is_fetched_and_all_go_back_to_it(
    lost: list[One], made_again: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    made = launched(lost)
    assert not made.named
    assert go_back(made, lost) == 12
    assert made.named == ((12, "snapshot 12"),), "of the older one nothing was fetched"
    assert made.shelf is not None
    assert read(made.shelf.newest) == (12, "a b 12")
    assert "this host's part of the snapshot after step 12 has come from host 1" in capfd.readouterr().err


def damage(holder: One, step: int) -> None:
    (core,) = (holder.directory / FOLDER / "host-0").glob(f"*{step}/rank-0/core-7.img")
    core.write_bytes(b"?" + core.read_bytes()[1:])


def test_a_copy_that_is_damaged_leaves_the_other_one(
    lost: list[One], made_again: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(lost[1], 12)
    assert go_back(launched(lost), lost) == 12
    told = capfd.readouterr().err
    assert "the copy of this host's part after step 12 on host 1" in told
    assert "core-7.img is not what was written" in told
    assert "after step 12 has come from host 2" in told


def test_where_all_copies_are_damaged_all_go_back_to_the_one_before(
    lost: list[One], made_again: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    for holder in lost[1:]:
        damage(holder, 12)
    made = launched(lost)
    assert go_back(made, lost) == 4
    assert made_again == ["make 4"]
    told = capfd.readouterr().err
    assert "the snapshot after step 12 is of no use: Its part could not be had from another host" in told
    assert "That after step 4 is tried." in told
    assert made.named == ((4, "snapshot 4"),)


def test_where_its_own_part_is_damaged_a_host_goes_back_by_a_copy(
    lost: list[One], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own is not touched: older ones may be whole."""
    one = lost[0]
    for step in STEPS:
        one.run(fetch(one.hosts, 1, one.shelf.directory, ProcessSnapshot(Path(), step, f"snapshot {step}")))
    (core,) = one.shelf.directory.glob("*12/rank-0/core-7.img")
    core.write_bytes(b"?")
    found: list[tuple[int, str]] = []

    def again(criu: Any, snapshot: ProcessSnapshot, *arguments: Any, **more: Any) -> Any:
        try:
            found.append(read(snapshot))
        except DamagedSnapshot as error:
            raise NotMadeAgain(str(error)) from error
        return SimpleNamespace(step=snapshot.step, plan={"made": 0}, undo=lambda: None)

    monkeypatch.setattr(going_back, "made_again", again)
    made = launched(lost)
    assert made.named == ((4, "snapshot 4"), (12, "snapshot 12"))
    assert go_back(made, lost) == 12
    assert found == [(12, "a b 12")]
    told = capfd.readouterr().err
    assert "this host's part of the snapshot after step 12 is damaged" in told
    assert "has come from host 1" in told
    assert list(one.shelf.directory.glob("unfinished*")) == []
    assert read(ProcessSnapshot(one.shelf.directory / "snapshot-0000000004", 4)) == (4, "a b 4")


def test_a_host_that_is_to_end_tells_nobody_that_a_snapshot_is_of_no_use(
    lost: list[One], made_again: list[str]
) -> None:
    class Ended(Exception):
        pass

    def heed() -> None:
        raise Ended

    together = AllMadeAgain(lost[0].hosts, lambda: True, heed)
    with pytest.raises(Ended):
        launched(lost).go_back(STORE, [], is_first=True, together=together)
    time.sleep(0.1)
    said = [arrived for one in lost[1:] for arrived in one.hosts.take()]
    assert [one for one in said if isinstance(one.message, agents.RanksMadeAgain)] == []  # type: ignore[union-attr]
    assert made_again == []


def test_what_was_fetched_and_can_not_be_made_again_leaves_the_one_before(
    lost: list[One], made_again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = going_back.made_again

    def fails(criu: Any, snapshot: ProcessSnapshot, *arguments: Any, **more: Any) -> Any:
        if snapshot.step == 12:
            raise NotMadeAgain("CRIU says no.")
        return again(criu, snapshot, *arguments, **more)

    monkeypatch.setattr(going_back, "made_again", fails)
    assert go_back(launched(lost), lost) == 4
    assert made_again == ["make 4"]


def test_a_part_of_another_kind_of_machine_is_of_no_use(lost: list[One], made_again: list[str]) -> None:
    made = launched(lost, {**JOB, "kernel": "7"})
    assert go_back(made, lost) is None
    assert made_again == []


def test_a_host_where_numbers_are_taken_begins_again(
    lost: list[One], made_again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_job, "where_to_count_from", lambda directory: 300)
    made = launched(lost)
    with pytest.raises(HostBeginsAgain):
        go_back(made, lost)
    assert launched(lost).named == ((12, "snapshot 12"),), "it need not be fetched again"
    monkeypatch.setattr(os, "getpid", lambda: 1)  # the first of its namespace
    lose_disk(lost[0])
    assert go_back(launched(lost), lost) == 12


def test_the_room_for_snapshots_counts_those_that_are_there(lost: list[One], tmp_path: Path) -> None:
    made = launched(lost)
    status = os.statvfs(tmp_path)
    assert made.room >= (status.f_bavail * status.f_frsize >> 20) - 100


def test_what_has_copies_stays_until_a_newer_one_has_them(lost: list[One]) -> None:
    one = lost[1]
    for step in (16, 20, 24):
        one.put(step, f"a b {step}")
    assert [step for step, _ in one.shelf.named] == [4, 12, 20, 24]
    one.copy(24)
    assert [step for step, _ in one.shelf.named] == [12, 20, 24]
    assert read(one.shelf.newest) == (24, "a b 24")
    assert len(pages_of(one.shelf.directory)) >= 3
