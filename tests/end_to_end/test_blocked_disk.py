"""A checkpoint directory on a file system that does not answer for a while, or never again."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import preloads
import pytest
from gpt import RUN, TRAINING, digests
from launcher import Launcher

from jitckpt.agent.control.requests import SAME_REQUEST_SECONDS


@pytest.fixture
def blocked(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that blocks the checkpoint directory for as long as it is there."""
    directory = launcher.directory / "ckpt"
    directory.mkdir()
    monkeypatch.setenv("LD_PRELOAD", str(preloads.compiled(launcher.directory)))
    monkeypatch.setenv("DISK_BLOCKED", str(directory / "blocked"))
    yield directory / "blocked"
    (directory / "blocked").unlink(missing_ok=True)


def read_until(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    read = ""
    for line in stream:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} never came: {read}")


def begun(launcher: Launcher, *options: str) -> "subprocess.Popen[str]":
    process = launcher.start(*RUN, *options, *TRAINING)
    read_until(process.stdout, "step 3 of")
    return process


def test_it_does_not_keep_a_job_from_ending(launcher: Launcher, blocked: Path) -> None:
    process = begun(launcher, "--save-deadline", "1")
    blocked.touch()
    process.send_signal(signal.SIGTERM)
    ended = launcher.finish(process)  # within its limit
    assert blocked.exists()
    assert ended.status == 1
    assert (
        "the state could not be saved: rank 0 did not save in time, rank 1 did not save in time" in ended.err
    )
    assert f"the file system of {blocked.parent} does not answer" in ended.err


def test_a_second_signal_ends_a_job_at_once(launcher: Launcher, blocked: Path) -> None:
    process = begun(launcher, "--save-deadline", "600")
    blocked.touch()
    process.send_signal(signal.SIGTERM)
    read_until(process.stderr, "to save the state")
    time.sleep(SAME_REQUEST_SECONDS)
    process.send_signal(signal.SIGTERM)
    ended = launcher.finish(process)
    assert blocked.exists()
    assert ended.status == 1


def test_a_recovery_goes_on_once_it_answers(
    launcher: Launcher, blocked: Path, undisturbed: list[str]
) -> None:
    process = begun(launcher, "--fault", "rank=1 step=8 phase=backward kind=kill")
    blocked.touch()
    said = read_until(process.stderr, "to save the state")
    time.sleep(1)
    blocked.unlink()
    ended = launcher.finish(process)
    assert ended.status == 0, said + ended.err
    assert re.search("Restart 1 went on from step [67],", ended.err)  # rank 0 may have been a step behind
    assert digests(ended.out) == undisturbed
