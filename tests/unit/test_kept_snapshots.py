"""A launcher's snapshots over all starts: what stays, what is said, and that all hosts go back or none."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from test_shelf import JOB

from jitckpt.agent.migration import going_back
from jitckpt.agent.migration.all_made_again import AllMadeAgain
from jitckpt.agent.migration.going_back import NotMadeAgain
from jitckpt.agent.migration.kept_snapshots import ALONE, KeptSnapshots
from jitckpt.agent.migration.shelf import Shelf
from jitckpt.errors import CheckpointError, HostsError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, HostLost
from jitckpt.wire import agents

STORE = ("127.0.0.1", 1)


def put(shelf: Shelf | None, step: int, name: str) -> None:
    """Put a snapshot there that all hosts have."""
    assert shelf is not None
    shelf.put(shelf.begin(step, in_memory=False), {"step": step, "name": name}, lambda size, error: None)
    shelf.settle()
    shelf._stays = 2  # as if its images had been in memory
    shelf.all_have()


def kept(directory: Path, hold: Any = lambda folder: None) -> KeptSnapshots:
    found: Any = None  # CRIU is not asked for anything
    made = KeptSnapshots(directory, found, EventLog(), hold=hold, whose=lambda place: JOB)
    made.mark = "mark"
    return made


class Hosts:
    """This host is the first of three; `said` is what the others say, in their order."""

    index, all = 0, range(3)

    def __init__(self, *said: object) -> None:
        self._said, self.told = list(said), list[object]()
        self.wake = os.eventfd(1)

    def broadcast(self, message: agents.AgentMessage) -> None:
        self.told.append(message)

    def take(self) -> list[object]:
        return [self._said.pop(0)] if self._said else []

    def name(self, host: int) -> str:
        return f"host {host} (10.0.0.{host})"


def together(*said: object, interrupted: bool = False) -> AllMadeAgain:
    hosts: Any = Hosts(*said)
    return AllMadeAgain(hosts, lambda: interrupted)


def made(host: int, name: str, why: str = "") -> Arrived:
    return Arrived(host, agents.RanksMadeAgain(name, why))


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with snapshots: those of step 8 can't be gone back to."""
    done: list[str] = []

    class Again:
        plan: Mapping[str, float] = MappingProxyType({"made": 0})

        def __init__(self, step: int) -> None:
            self.step = step

        def undo(self) -> None:
            done.append(f"undo {self.step}")

    def again(found: Any, snapshot: Any, *arguments: Any, **more: Any) -> Again:
        done.append(f"make {snapshot.step}")
        if snapshot.step == 8:
            raise NotMadeAgain("It is damaged.")
        return Again(snapshot.step)

    monkeypatch.setattr(going_back, "made_again", again)
    return done


@pytest.mark.parametrize("place", [ALONE, (1, 2)])
def test_only_a_job_that_has_succeeded_takes_its_snapshots_away(tmp_path: Path, place: Any) -> None:
    one = kept(tmp_path)
    one.take_place(place)
    put(one.shelf, 4, "first")
    one.close(succeeded=False)
    assert len(list(tmp_path.rglob("snapshot-*"))) == 1
    again = kept(tmp_path)
    again.take_place(place)
    assert again.named == ((4, "first"),)
    again.close(succeeded=True)
    assert list(tmp_path.rglob("snapshot-*")) == []


def test_a_host_that_comes_with_another_place_says_where_the_snapshots_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = kept(tmp_path)
    one.take_place((0, 2))
    put(one.shelf, 4, "first")
    other = kept(tmp_path)
    other.take_place((1, 2))
    assert f"there are snapshots of host-0 in {tmp_path}, and none of host-1, which" in capfd.readouterr().err
    other.take_place((0, 2))
    assert other.named == ((4, "first"),)
    assert "there are snapshots" not in capfd.readouterr().err


def test_a_folder_that_another_launcher_has_is_refused(tmp_path: Path) -> None:
    def hold(folder: Path) -> str | None:
        raise CheckpointError(f"{folder} is in use by another job.")

    with pytest.raises(HostsError, match=r"host-1: .* is in use by another job"):
        kept(tmp_path, hold).take_place((1, 2))


@pytest.mark.parametrize(
    ("hosts", "newest", "said"),
    [
        ([[(4, "a"), (8, "b")], [(4, "a")]], 4, ""),
        ([[(4, "a"), (8, "b")], [(4, "of another run")]], None, "the job begins anew: not all hosts have"),
        ([[], []], None, ""),
    ],
)
def test_what_not_all_hosts_have_is_of_no_use(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    hosts: Sequence[Sequence[tuple[int, str]]],
    newest: int | None,
    said: str,
) -> None:
    one = kept(tmp_path)
    one.take_place((0, 2))
    for step, name in hosts[0]:
        put(one.shelf, step, name)
    one.agree(hosts)
    assert one.shelf is not None
    assert one.shelf.step == newest
    err = capfd.readouterr().err
    assert said in err
    assert bool(said) == bool(err)


def test_where_one_host_can_not_all_try_the_one_before(
    tmp_path: Path, made_again: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    one = kept(tmp_path)
    one.take_place((0, 3))
    put(one.shelf, 4, "first")
    put(one.shelf, 12, "second")
    late = Arrived(1, agents.Alive())
    others = together(
        made(2, "second"), late, made(1, "second", "It is damaged."), made(1, "first"), made(2, "first")
    )
    again = one.go_back(STORE, [], is_first=False, together=others)
    assert again is not None
    assert again.step == 4
    assert made_again == ["make 12", "undo 12", "make 4"]
    assert others.others == [late]
    told = capfd.readouterr().err
    assert "step 12 is of no use: It is damaged. (host 1 (10.0.0.1)) That after step 4 is tried." in told


def test_where_this_host_can_not_the_others_hear_it(tmp_path: Path, made_again: list[str]) -> None:
    one = kept(tmp_path)
    one.take_place((0, 3))
    put(one.shelf, 8, "only")
    others = together(made(1, "only"), made(2, "only"))
    assert one.go_back(STORE, [], is_first=True, together=others) is None
    hosts: Any = others._hosts
    assert hosts.told == [agents.RanksMadeAgain("only", "It is damaged.")]
    assert made_again == ["make 8"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_start_that_is_over_is_not_waited_for(
    tmp_path: Path, made_again: list[str], interrupted: bool
) -> None:
    one = kept(tmp_path)
    one.take_place((0, 3))
    put(one.shelf, 4, "first")
    lost = HostLost(2, "it is gone")
    others = together(*([] if interrupted else [lost]), interrupted=interrupted)
    assert one.go_back(STORE, [], is_first=False, together=others) is not None
    assert others.others == ([] if interrupted else [lost])
    assert one.named == ((4, "first"),), "the next start goes back to the same one"
    assert made_again == ["make 4"]
