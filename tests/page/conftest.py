"""A page that is served beside a directory, and a real browser."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

JITCKPT = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
CHROMIUM = shutil.which("chromium")
LIMIT = 60.0  # seconds, for a hang

Serve = Callable[..., str]


@pytest.fixture
def processes() -> list["subprocess.Popen[str]"]:
    """Those that serve pages."""
    return []


@pytest.fixture
def serve(processes: list["subprocess.Popen[str]"]) -> Iterator[Serve]:
    """Serve the page of a directory; gives its address."""

    def serve_(directory: Path, address: str = "0", token: str = "") -> str:
        environment = os.environ | ({"JITCKPT_PAGE_TOKEN": token} if token else {})
        process = subprocess.Popen(
            [*JITCKPT, "watch", str(directory), "--page", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, process.communicate(timeout=LIMIT)
        return line.split()[-1]

    yield serve_
    for process in processes:
        assert process.poll() is None, process.communicate(timeout=LIMIT)
        process.terminate()
        _, said = process.communicate(timeout=LIMIT)
        assert said == ""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what has to come."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
