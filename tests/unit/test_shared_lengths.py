"""Files of one rank that another may make longer while it is an image."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jitckpt.agent.migration import looked_at


@contextmanager
def has_open(path: Path, mode: str, *, locks: bool = False) -> Iterator[int]:
    """Give the number of a process whose child has a file open."""
    lock = "import fcntl; fcntl.flock(file, fcntl.LOCK_SH); " * locks
    opens = f"file = open({str(path)!r}, {mode!r}); {lock}print(flush=True); input()"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {opens!r}])"
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        assert process.stdin is not None
        process.stdin.write(b"\n")


@pytest.mark.parametrize(
    ("its", "others", "is_one"),
    [
        ("a", "a", False),
        ("a", "w", False),
        ("a+", "a", True),
        ("w", "a", True),
        ("r", "a", True),
        ("r", "r", False),
        ("w", "r", False),
    ],
)
def test_a_file_that_another_writes_and_it_does_more_than_append_to(
    tmp_path: Path, its: str, others: str, is_one: bool
) -> None:
    path = tmp_path / "log"
    path.touch()
    with has_open(path, its) as mine, has_open(path, others) as another:
        assert looked_at.shared_lengths(mine, another) == []  # a lock
        path.write_text("line\n")
        assert looked_at.shared_lengths(mine, another) == ([str(path)] if is_one else [])
        assert looked_at.shared_lengths(mine, mine) == ([str(path)] if its in ("a+", "w") else [])


def test_a_file_that_it_has_locked_does_not_get_longer(tmp_path: Path) -> None:
    """As a run's own job.lock, which all its processes have open."""
    path = tmp_path / "job.lock"
    path.write_text("which run it is\n")
    with has_open(path, "r+", locks=True) as mine, has_open(path, "r+", locks=True) as another:
        assert looked_at.shared_lengths(mine, another) == []
