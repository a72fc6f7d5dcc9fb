"""Signals that are sent to all processes of a job: who does something about them, and who does not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jitckpt.device import LIBRARY_DIR

PROGRAM = f"""
import ctypes, os, signal, sys, time
library = ctypes.CDLL({str(LIBRARY_DIR / "libjitckpt.so")!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    assert library.jitckpt_hold_still(number, int(sys.argv[1])) == 0
    assert library.jitckpt_hold_still(number, int(sys.argv[1])) == 0
def say(text): os.write(1, text.encode() + b"\\n")
say("ready")
try:
    for line in sys.stdin:
        exec(line)
        say("done")
except KeyboardInterrupt:
    say("interrupted")
"""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])


class Process:
    """A process of a job whose agent is the process with this id; a session of its own."""

    def __init__(self, agent: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, str(agent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.reads() == "ready"

    def reads(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.reads()


@pytest.fixture
def agent() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def started(agent: "subprocess.Popen[bytes]") -> Iterator[Process]:
    one = Process(agent.pid)
    yield one
    one.process.kill()
    one.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_strangers_signal_is_the_agents_to_decide_about(started: Process, number: int) -> None:
    started.process.send_signal(number)
    assert started.does("pass") == "done"


def test_a_forked_child_holds_still_too(started: Process) -> None:
    """Such as a worker of the DataLoader's."""
    child = int(started.does("child = os.fork() or time.sleep(600); print(child, flush=True)"))
    assert started.reads() == "done"
    os.kill(child, signal.SIGTERM)
    assert started.does("assert os.waitpid(child, os.WNOHANG) == (0, 0)") == "done"
    assert started.does("os.kill(child, signal.SIGKILL)") == "done"


@SIGNALS
def test_the_agents_own_signal_is_for_this_process(number: int) -> None:
    one = Process(os.getpid())
    one.process.send_signal(number)
    assert one.process.wait(60) == -number


def test_what_python_makes_of_an_interrupt_stays() -> None:
    one = Process(os.getpid())
    assert one.does("pass") == "done"
    one.process.send_signal(signal.SIGINT)
    assert one.reads() == "interrupted"
    assert one.process.wait(60) == 0


@SIGNALS
def test_the_program_can_end_itself_and_its_children(started: Process, number: int) -> None:
    assert started.does("child = os.fork() or time.sleep(600)") == "done"
    assert started.does(f"os.kill(child, {number})") == "done"
    assert started.does(f"assert os.waitpid(child, 0)[1] == {number}") == "done"
    started.does(f"os.kill(os.getpid(), {number})")
    assert started.process.wait(60) == -number


@SIGNALS
def test_without_the_agent_a_signal_is_what_it_was(
    started: Process, agent: "subprocess.Popen[bytes]", number: int
) -> None:
    agent.kill()
    agent.wait()
    started.process.send_signal(number)
    assert started.process.wait(60) == -number


@SIGNALS
def test_a_handler_that_the_program_sets_is_called(started: Process, number: int) -> None:
    assert started.does(f"signal.signal({number}, lambda *_: say('own'))") == "done"
    started.process.send_signal(number)
    assert started.reads() == "own"


@SIGNALS
def test_programs_that_it_starts_are_as_they_were(started: Process, number: int) -> None:
    program = f"import signal; print(signal.getsignal({number}) is signal.SIG_DFL)"
    line = f"import subprocess; subprocess.run([sys.executable, '-c', {program!r}])"
    assert started.does(line) == "True"


HELPERS = {
    "torch's manager of shared memory": ["torch_shm_manager"],
    "Python's resource tracker": [
        *(sys.executable, "-c"),
        "from multiprocessing.resource_tracker import main;import sys;sys.stdout.write('x\\n');"
        "sys.stdout.flush();main(0)",
    ],
}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
@pytest.mark.parametrize("helper", HELPERS)
def test_what_a_loader_of_data_can_not_do_without_stays(
    agent: "subprocess.Popen[bytes]", helper: str, number: int, tmp_path: Path
) -> None:
    """It has no code of ours, and is in a session of its own or in its rank's."""
    library = str(LIBRARY_DIR / "libjitckpt.so")
    environment = {"LD_PRELOAD": library, "JITCKPT_AGENT_PID": str(agent.pid), "TMPDIR": str(tmp_path)}
    pipe, command = subprocess.PIPE, HELPERS[helper]
    manager = str(Path(torch.__file__).parent / "bin" / "torch_shm_manager")
    with subprocess.Popen(
        command,
        executable=manager if command == ["torch_shm_manager"] else None,  # so torch calls it
        stdin=pipe,
        stdout=pipe,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # it has begun
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        agent.kill()
        agent.wait()
        process.send_signal(number)
        assert process.wait(60) == -number
