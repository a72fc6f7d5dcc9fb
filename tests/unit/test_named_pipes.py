"""A named pipe in the place of a file is refused by a sentence, and never waited for."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from descriptors import held_descriptors

from jitckpt import cli
from jitckpt.decisions.check import InvalidInput
from jitckpt.errors import CheckpointError
from jitckpt.events import FILE_NAME, EventLog, read_events
from jitckpt.planning import cluster, traces
from jitckpt.reports.following import Follower
from jitckpt.saves import directory_lock, folders
from jitckpt.system import job_socket, regular_file

LONG = 120  # seconds, after which it waits for ever


@pytest.fixture(autouse=True)
def _waits_for_nobody() -> Iterator[None]:
    signal.alarm(LONG)
    yield
    signal.alarm(0)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe", 0o600)
    return tmp_path / "pipe"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT])
def test_what_is_no_file_is_not_opened(tmp_path: Path, pipe: Path, flags: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        before = held_descriptors()
        for path in (pipe, tmp_path / "socket", tmp_path, Path("/dev/zero")):
            with pytest.raises(regular_file.NoFileError, match="it is no file"):
                regular_file.open_regular(path, flags)
        assert held_descriptors() <= before


def test_a_file_and_what_leads_to_one_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text\n")
    (tmp_path / "link").symlink_to("file")
    assert regular_file.text_of(tmp_path / "link") == "text\n"
    with pytest.raises(FileNotFoundError):
        regular_file.content_of(tmp_path / "nowhere")


@pytest.mark.parametrize("option", ["--secret-file", "--failure-domains"])
def test_an_options_file(pipe: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", option, str(pipe), __file__])
    assert f"{pipe} can't be read: " in (said := " ".join(capsys.readouterr().err.split()))
    assert "it is no file" in said


def test_the_log_of_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    log = EventLog(tmp_path)
    log.write("first")
    log.write("second")
    assert (
        capsys.readouterr().err.count(f"events can't be written to {tmp_path / FILE_NAME}: it is no file")
        == 1
    )
    with pytest.raises(OSError, match="it is no file"):
        read_events(tmp_path)
    follower = Follower(tmp_path)
    follower.look()
    assert follower.problem == f"{tmp_path / FILE_NAME} can't be read: it is no file"


@pytest.mark.parametrize("command", ["timeline", "inspect", "resume"])
def test_commands_that_look_into_a_checkpoint_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in (FILE_NAME, "job.json", "job.lock", job_socket.FILE_NAME):
        os.mkfifo(tmp_path / name)
    with suppress(SystemExit):  # with a sentence
        cli.main([command, str(tmp_path)])
    captured = capsys.readouterr()
    assert "it is no file" in " ".join((captured.out + captured.err).split())


def test_the_lock_of_a_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / directory_lock.LOCK_FILE)
    with pytest.raises(CheckpointError, match=r"job\.lock can't be written: it is no file"):
        directory_lock.hold(tmp_path, "run")


@pytest.mark.parametrize("read", [cluster.read_description, traces.read_trace])
def test_what_is_planned_from(pipe: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises((InvalidInput, OSError), match="it is no file"):
        read(pipe)


def test_a_file_of_a_save(pipe: Path) -> None:
    with pytest.raises(OSError, match="it is no file"):
        folders.checksum(pipe)
