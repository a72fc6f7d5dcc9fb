"""Starts commands for tests, and sees to it that they leave no process behind."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fork_server import SERVERS, python_path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
JITCKPT = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
JITCKPT_RUN = [*JITCKPT, "run", "--standalone"]
LIMIT = 480


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


def until_told(agent: "subprocess.Popen[str]", text: str) -> str:
    """Return what an agent says up to this."""
    assert agent.stderr is not None
    told = ""
    for line in agent.stderr:
        told += line
        if text in line:
            return told
    raise AssertionError(told)


class Launcher:
    """Runs commands that must leave no process behind: all of theirs carry a mark in their environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *command: str) -> "subprocess.Popen[str]":
        environment = {key: value for key, value in os.environ.items() if not key.startswith("JITCKPT_")}
        environment |= {
            "TEST_MARK": self.mark,
            "PYTHONPATH": python_path(),
            "TMPDIR": str(self.directory),
        }
        if process := SERVERS.start(command, self.directory, environment):
            self.started.append(process)
            return process
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def run(self, *command: str) -> Result:
        return self.finish(self.start(*command))

    def succeed(self, *command: str) -> str:
        """Run a command that must end well; return what it printed."""
        result = self.run(*command)
        assert result.status == 0, result.err
        return result.out

    def finish(self, process: "subprocess.Popen[str]") -> Result:
        out, err = process.communicate(timeout=LIMIT)
        return Result(process.returncode, out, err)

    def survivors(self) -> list[int]:
        """Return the processes that carry the mark and are no zombies."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"TEST_MARK={self.mark}".encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except (ProcessLookupError, FileNotFoundError, PermissionError):
                continue
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.01)
