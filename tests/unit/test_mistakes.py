"""What of a program's end is told the agent before its first step: in processes that end in one way each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from jitckpt.errors import CheckpointError, HostsError, RehearsedFailure, SaveError, TreeError
from jitckpt.ring import local_state
from jitckpt.system import descriptors
from jitckpt.wire import protocol
from jitckpt.worker.ends.mistakes import may_pass, refusal

PROLOGUE = """
import torch
from jitckpt.worker.ends import mistakes
from jitckpt.errors import CheckpointError
mistakes.watch()
"""
STEP = """
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.SGD([parameter]).step()
"""


def said(program: str, folder: Path) -> list[protocol.WorkerMessage]:
    """Return what a worker with this program tells its agent."""
    script = folder / "script.py"
    script.write_text(PROLOGUE + program)
    agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    numbers = {descriptors.AGENT: theirs.fileno(), descriptors.STATE: local_state.create()}
    variables = {name: str(number) for name, number in numbers.items()}
    subprocess.run(
        [sys.executable, script],
        env=os.environ | variables | {descriptors.PROOF: descriptors.proof(0, numbers)},
        pass_fds=tuple(numbers.values()),
        stderr=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    theirs.close()
    os.close(numbers[descriptors.STATE])
    heard = []
    with agent:
        while data := agent.recv(protocol.MAX_BYTES):
            heard.append(protocol.decode(data))
    assert isinstance(heard[0], protocol.TorchLoaded)
    return heard[1:]


@pytest.mark.parametrize(
    ("program", "mistake"),
    [
        ("import nothing_there", "ModuleNotFoundError: No module named 'nothing_there'"),
        ("len(7)", "TypeError: object of type 'int' has no len()"),
        ("import sys; sys.exit(2)", "SystemExit: 2"),
        ("import sys; sys.exit('no data')", "SystemExit: no data"),
    ],
)
def test_a_mistake_before_the_first_step_is_told(program: str, mistake: str, tmp_path: Path) -> None:
    (message,) = said(program, tmp_path)
    assert isinstance(message, protocol.Failing)
    assert message.mistake == mistake


@pytest.mark.parametrize(
    "program",
    [
        STEP + "len(7)",
        STEP + "import sys; sys.exit(2)",
        STEP + "import sys; sys.exit('no data')",
        "import sys; sys.exit('NCCL does not answer')",
        "import sys; sys.exit(3)",
        "raise ConnectionError",
        "",
    ],
)
def test_what_may_pass_is_not_told_nor_what_comes_after_a_step(program: str, tmp_path: Path) -> None:
    assert said(program, tmp_path) == []


def test_a_refusal_is_told_whatever_it_was_made_into(tmp_path: Path) -> None:
    program = """
try:
    raise CheckpointError("No.")
except CheckpointError as error:
    raise RuntimeError("the trainer can't go on") from error
"""
    (message,) = said(STEP + program, tmp_path)
    assert isinstance(message, protocol.WorkRefused)
    assert message.reason == "No."


def test_a_refusal_that_the_script_takes_is_none(tmp_path: Path) -> None:
    assert said("try:\n    raise CheckpointError('No.')\nexcept CheckpointError:\n    pass\n", tmp_path) == []


def test_what_a_restart_can_cure_is_no_refusal() -> None:
    assert refusal(CheckpointError("a")) == "a"
    assert refusal(TreeError("b")) == "b"
    for error in (SaveError("the disk is full"), HostsError("they are gone"), ValueError("c")):
        assert refusal(error) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError(),
        TimeoutError(),
        MemoryError(),
        RehearsedFailure(),
        torch.OutOfMemoryError(),
        torch.AcceleratorError(),
        torch.distributed.DistNetworkError(),
        ProcessRaisedException("", 0, 0),
        subprocess.CalledProcessError(1, "a"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
    ],
)
def test_devices_networks_and_other_processes_may_be_better_next_time(error: BaseException) -> None:
    assert may_pass(error)
    wrapped = ValueError()
    wrapped.__cause__ = error
    assert may_pass(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        RuntimeError("size mismatch"),
        ImportError(),
        KeyError(),
        AssertionError(),
        torch.AcceleratorError("CUDA error: invalid device ordinal"),
        ProcessRaisedException("torch.AcceleratorError: CUDA error: invalid device ordinal", 0, 0),
    ],
)
def test_a_mistake_does_not_pass(error: BaseException) -> None:
    assert not may_pass(error)
