"""The launcher's folder goes with it, or with the next launcher."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jitckpt.system.launcher_folder import launcher_folder

PROGRAM = """
import signal
from jitckpt.system.launcher_folder import launcher_folder
with launcher_folder() as folder:
    (folder / "attempt_0" / "0").mkdir(parents=True)
    print(folder, flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_goes_unless_there_is_a_file_in_it(temporary: Path) -> None:
    with launcher_folder() as folder:
        (folder / "empty").mkdir()
        assert list(temporary.iterdir()) == [folder]
    with launcher_folder() as kept:
        (kept / "error.json").touch()
    assert list(temporary.iterdir()) == [kept]


def test_one_whose_launcher_was_killed_goes_with_the_next(temporary: Path) -> None:
    """Its guardian was, too: a scheduler ends all processes of a job at once."""
    launcher = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    left = Path(launcher.stdout.readline().strip())
    with launcher_folder() as folder:
        assert set(temporary.iterdir()) == {left, folder}, "it lives"
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    assert left.exists()
    with launcher_folder() as folder:
        assert list(temporary.iterdir()) == [folder]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_it_goes_with_the_launcher_and_no_other_takes_it(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with launcher_folder() as first:
        with launcher_folder() as second:
            assert set(temporary.iterdir()) == {first, second}
        assert list(temporary.iterdir()) == [first]
    assert list(temporary.iterdir()) == []


def test_what_only_bears_the_name_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / "jitckpt-launcher-link").symlink_to(elsewhere)
    (temporary / "jitckpt-launcher-file").touch()
    with launcher_folder():
        pass
    assert len(list(temporary.iterdir())) == 3
