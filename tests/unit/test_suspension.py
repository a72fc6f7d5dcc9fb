"""`jitckpt suspend` and `resume`: what is decided, how the launcher is asked, and where the images lie."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from jitckpt.agent.migration import image_folder
from jitckpt.agent.migration.callers import Callers
from jitckpt.agent.migration.image_folder import DamagedImage, ImageFolder
from jitckpt.cli import migrate
from jitckpt.decisions.transparent.suspension import (
    CannotSuspend,
    Suspension,
    came_too_late,
    lacks_room,
    meeting,
)
from jitckpt.system import datagrams
from jitckpt.system.job_socket import FILE_NAME, Caller, JobSocket, JobSocketError, ask
from jitckpt.system.resting_place import Guest, RestingPlace
from jitckpt.wire.commands import FROM_LAUNCHER, ResumeJob
from jitckpt.wire.environment import REST


def reason_of(asked: Suspension | CannotSuspend | int) -> str:
    assert isinstance(asked, CannotSuspend)
    return asked.reason


def test_ranks_meet_behind_a_step_that_none_has_come_to() -> None:
    assert meeting([20, 21]) == 24
    assert meeting([0, 0]) == 6  # behind the first that is validated
    assert "unequally many optimizer steps (by now 20 to 40)" in reason_of(meeting([20, 40]))
    assert not came_too_late([23, 22], 24)
    assert came_too_late([24, 22], 24)


def test_a_job_is_suspended_once_and_resumed_once() -> None:
    job = Suspension()
    assert reason_of(job.resume()) == "It is not suspended."
    asked = job.ask([20, 20])
    assert isinstance(asked, Suspension)
    assert (asked.phase, asked.step) == ("asked", 23)
    assert reason_of(asked.ask([20, 20])) == "It is to be suspended already, after step 23."
    assert reason_of(asked.resume()) == "It is not suspended."
    suspended = asked.suspended()
    assert reason_of(suspended.ask([20, 20])) == "It is already suspended."
    assert "stays suspended: there is a process 7 (sh)" in reason_of(
        suspended.resume(["there is a process 7 (sh)"])
    )
    resuming = suspended.resume()
    assert isinstance(resuming, Suspension)
    assert reason_of(resuming.ask([20, 20])) == "It is resuming."
    assert reason_of(resuming.resume()) == "It is not suspended."
    assert resuming.over() == Suspension()


def test_a_disk_needs_some_room_beside_the_images() -> None:
    assert not lacks_room(1600, 1700)
    assert lacks_room(1600, 1699)


def test_an_agent_tells_its_ranks_of_a_step_and_hears_how_far_they_are() -> None:
    place = RestingPlace(2)
    guests = [Guest(place.of(rank)[REST.name]) for rank in (0, 1)]
    assert [guest.begins(7) for guest in guests] == [False, False]
    assert guests[1].begins(8) is False
    assert place.steps == [7, 8]
    place.want(9)
    assert [guest.begins(9) for guest in guests] == [True, True]
    assert guests[0].begins(10) is False
    place.want(0)
    assert guests[1].begins(9) is False
    place.close()
    for guest in guests:
        guest.close()


def test_images_are_the_users_alone_and_refused_where_a_bit_differs(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "new")
    path = folder.path / "rank-1"
    assert folder.of(1) == folder.of(1)
    (path / "pages-1.img").write_bytes(b"x" * 5000)
    (path / "dump.log").write_text("not an image")
    assert (folder.path.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o700)
    written = folder.written(1)
    assert (list(written.digests), written.bytes) == (["pages-1.img"], 5000)
    folder.check(1, written)
    (path / "more.img").touch()
    with pytest.raises(DamagedImage, match=r"more.img is not what was written"):
        folder.check(1, written)
    (path / "more.img").unlink()
    (path / "pages-1.img").write_bytes(b"x" * 4999 + b"y")
    with pytest.raises(DamagedImage, match=r"rank-1/pages-1.img is not what was written"):
        folder.check(1, written)
    (path / "pages-1.img").unlink()
    with pytest.raises(DamagedImage, match=r"pages-1.img is gone"):
        folder.check(1, written)
    assert image_folder.remove_left(tmp_path / "new") == []  # its owner lives
    folder.remove()
    folder.remove()
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_killed_launcher_has_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f"{image_folder.PREFIX}abc"
    (left / "rank-0").mkdir(parents=True)
    (left / "rank-0" / "pages-1.img").touch()
    (tmp_path / "another").mkdir()
    assert image_folder.remove_left(tmp_path) == [left]
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_a_launcher_is_asked_by_its_directory(tmp_path: Path) -> None:
    socket = JobSocket(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    asked = []

    def serve() -> None:
        socket.listener.setblocking(True)
        caller = socket.accept()
        assert caller is not None
        caller.connection.setblocking(True)
        asked.append(caller.asks())
        caller.hear("Soon.")
        caller.hear("Done.", 0)
        caller.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert list(ask(tmp_path, ResumeJob())) == [("Soon.", None), ("Done.", 0)]
    thread.join()
    assert asked == [ResumeJob()]
    socket.close()
    assert not (tmp_path / FILE_NAME).exists()
    with pytest.raises(JobSocketError, match=r"There is no directory .*/nowhere\.$"):
        list(ask(tmp_path / "nowhere", ResumeJob()))
    with pytest.raises(JobSocketError, match="started without --suspendable"):
        next(ask(tmp_path, ResumeJob()))


@pytest.mark.parametrize(
    "nonsense", [b"no JSON", b"[]", b'{"resume": true}', b'{"type": "suspend", "to": 7}']
)
def test_a_launcher_says_what_it_does_not_understand_and_lives_on(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(nonsense)
        nobody: Any = None
        Callers._hear(nobody, Caller(ours))
        heard = datagrams.receive(theirs, FROM_LAUNCHER)
        assert heard is not None
        assert heard[0].text.startswith("The launcher does not understand what it is asked: ")
        assert heard[0].status == 1


def test_what_is_no_answer_of_a_launcher_is_refused(tmp_path: Path) -> None:
    launcher = JobSocket(tmp_path)
    launcher.listener.setblocking(True)

    def serve() -> None:
        caller = launcher.accept()
        assert caller is not None
        caller.connection.setblocking(True)
        assert caller.asks() == ResumeJob()
        caller.connection.send(b'{"type": "told", "text": "Done.", "status": "0"}')

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(
        JobSocketError, match=r"The job's launcher says what makes no sense: .* can't be '0'\.$"
    ):
        next(ask(tmp_path, ResumeJob()))
    thread.join()
    launcher.close()


def test_a_launcher_that_is_gone_is_said(tmp_path: Path) -> None:
    told = {"socket": "jitckpt-job-nobody", "host": "elsewhere", "process": 77}
    (tmp_path / FILE_NAME).write_text(json.dumps(told))
    with pytest.raises(JobSocketError, match=r"process 77, can't be reached.* It is on elsewhere"):
        next(ask(tmp_path, ResumeJob()))
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(JobSocketError, match="can't be read"):
        next(ask(tmp_path, ResumeJob()))


@pytest.mark.parametrize("within", ["nan", "-1", "0", "inf", "soon"])
def test_a_time_that_never_ends_or_has_ended_is_no_limit(
    tmp_path: Path, within: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        migrate.main([str(tmp_path), f"--within={within}"])
    assert ended.value.code == 2
    assert f"--within: '{within}' is not a number of seconds above 0" in capsys.readouterr().err
