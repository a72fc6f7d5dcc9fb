"""One job a checkpoint directory: seen by processes, since locks are theirs."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitckpt.errors import CheckpointError
from jitckpt.saves import directory_lock

HOLD = """
import os, subprocess, sys
from pathlib import Path
from jitckpt.saves import directory_lock
from jitckpt import errors
directory_lock.PATIENCE_SECONDS = float(sys.argv[3])
try:
    print(directory_lock.hold(Path(sys.argv[1]), sys.argv[2]), flush=True)
except errors.CheckpointError as error:
    print(error, flush=True)
child = os.fork()  # which outlives it, and must not keep the lock
if child == 0:
    import time
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process of a run that takes the directory; its first line says how that went."""
    started = []

    def start(run: str, patience: float = 0.0) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD, str(tmp_path), run, str(patience)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.stdin is not None:
            process.stdin.close()  # then it ends, whatever it has said
            process.stdin = None
        if process.stdout is not None and (left := process.stdout.read().split()):
            os.kill(int(left[-1]), signal.SIGKILL)
        process.kill()
        process.communicate()


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: "subprocess.Popen[str]") -> None:
    """Kill it, and only then its child."""
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    os.kill(child, 0)  # it lives
    os.kill(child, signal.SIGKILL)


def test_processes_of_a_run_share_a_directory_and_another_run_is_refused(
    tmp_path: Path, start: Start
) -> None:
    # With patience: for a moment one of them has the lock, and its name is not in the file yet.
    one, two = start("run", 60), start("run", 60)
    assert [first_line(one), first_line(two)] == ["None", "None"]
    other = start("another")
    refusal = first_line(other)
    assert f"{tmp_path} is in use by another job, which took it at" in refusal
    assert str(one.pid) in refusal or str(two.pid) in refusal
    end(one)
    third = start("another")
    assert "is in use" in first_line(third), "the other process of the run is still there"
    for process in (two, other, third):
        end(process)


def test_a_killed_job_leaves_no_lock_and_one_that_ends_in_time_is_waited_for(start: Start) -> None:
    killed = start("run")
    assert first_line(killed) == "None"
    waiting = start("another", 60)
    end(killed)
    assert first_line(waiting) == "None"
    end(waiting)


def test_a_rank_that_just_takes_the_directory_is_not_called_another_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between its lock and its name in the file is a moment, which is long where the machine is busy."""
    take = [sys.executable, "-c", TAKE, str(tmp_path / "job.lock")]
    taking = subprocess.Popen(take, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert taking.stdout is not None
    assert taking.stdout.readline() == b"taken\n"
    assert directory_lock.hold(tmp_path, "run") is None
    directory_lock.release(tmp_path)
    assert capfd.readouterr().err == ""
    taking.communicate()


TAKE = """
import fcntl, json, sys, time
file = open(sys.argv[1], "w+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("taken", flush=True)
time.sleep(1)
print(json.dumps({"run": "run"}), file=file, flush=True)
fcntl.lockf(file, fcntl.LOCK_SH)
sys.stdin.read()
"""


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert "has no locks (No locks available)" in str(directory_lock.hold(tmp_path, "run"))
    directory_lock.release(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"host": 3}', b'{"time": 1e300, "pid": 1, "host": "h"}']
)
def test_a_damaged_lock_file_is_another_jobs(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    holder = start("run")
    assert first_line(holder) == "None"
    (tmp_path / "job.lock").write_bytes(content)
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(CheckpointError, match="is in use by another job"):
        directory_lock.hold(tmp_path, "another")
    end(holder)
    assert directory_lock.hold(tmp_path, "another") is None
    assert json.loads((tmp_path / "job.lock").read_bytes())["run"] == "another"
    directory_lock.release(tmp_path)
