"""Faults on order, as real torch meets them, and from outside with `jitckpt chaos`."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS, Run

from jitckpt.bindings.softgpu import ChaosError
from jitckpt.cli import chaos

# Uses its device without torch, then tells by a line that it has heard of one on standard input.
LISTENER = """
import ctypes, sys
softgpu = ctypes.CDLL(None)
pointer = ctypes.c_void_p()
softgpu.cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
print("ready", flush=True)
for _ in sys.stdin:
    print(softgpu.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1)), flush=True)
"""


def test_torch_says_what_it_says_on_a_gpu(run_program: Run) -> None:
    ended = run_program("faults_of_devices", SOFTGPU_DEVICES="3")
    lines = ended.stdout.splitlines()
    assert len(lines) == 1, ended.stdout + ended.stderr
    assert ended.returncode == 1, "a process whose device has failed can only end"
    assert "torch.AcceleratorError: CUDA error: an illegal memory access was encountered" in ended.stderr
    said = json.loads(lines[0])
    assert said["failed-allocation"] == [1, 0, 128], (
        "one retry, no failure, and the cached block is given back"
    )
    assert said["oom"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB.")
    assert "of which 0 bytes is free" in said["oom"]
    assert said["oom counted"] == [2, 1]
    assert said["healed"] == "no error"
    assert said["--fault failed-allocation"] == [3, 1]
    assert said["--fault oom"].startswith("OutOfMemoryError: CUDA out of memory.")
    assert said["slow"] is False
    assert said["slow healed"] == float(1 << 20)
    texts = {
        "sticky": "an illegal memory access was encountered",
        "ecc": "uncorrectable ECC error encountered",
        "device-lost": "unknown error",
    }
    for kind, text in texts.items():
        error = f"AcceleratorError: CUDA error: {text}"
        at_launch = error if kind == "device-lost" else "no error"
        assert said[kind] == [at_launch, *[error] * 4], kind


def test_torchs_watchdog_ends_the_rank_that_nccl_fails_on(
    softgpu_environment: dict[str, str], tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "faults_between_ranks.py"), str(tmp_path / "store"), str(rank)],
            # Of the minute that torch waits for its own debugging information.
            env=softgpu_environment | {"RANK": str(rank), "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out, err = ranks[1].communicate(timeout=100)
        assert ranks[0].stdout
        waits = ranks[0].stdout.readline()  # it may come there later than rank 1 ends
    finally:
        for rank in ranks:
            rank.kill()
    assert out == "waits\n"
    assert ranks[1].returncode == -signal.SIGABRT, err
    assert "ncclRemoteError" in err
    assert "remote process exited or there was a network error" in err
    assert "Connection closed by remote peer (rehearsed)" in err
    assert (waits, ranks[0].communicate()[0]) == ("waits\n", ""), "the other rank hangs"


@pytest.fixture
def listeners(softgpu_environment: dict[str, str], tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two processes that use softgpu, ranks 0 and 1, with the folder `control` for their sockets."""
    environment = softgpu_environment | {"SOFTGPU_CONTROL": str(tmp_path / "control")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LISTENER],
            env=environment | {"RANK": rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def said_by(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def allocation_of(process: "subprocess.Popen[str]") -> int:
    """Return the code of its next cudaMalloc."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(said_by(process))


def test_faults_come_from_outside(
    listeners: list["subprocess.Popen[str]"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [said_by(process) for process in listeners] == ["ready", "ready"]
    control, pids = str(tmp_path / "control"), [str(process.pid) for process in listeners]

    assert chaos.main([pids[0], "kind=failed-allocation"]) == 0
    assert capsys.readouterr().out == (
        f"process {pids[0]}: kind=failed-allocation call=1 is armed: allocation 1 from now on.\n"
    )
    assert [allocation_of(process) for process in listeners] == [2, 0]
    assert chaos.main([control, "rank=1 kind=failed-allocation call=2"]) == 0
    assert [[allocation_of(process) for process in listeners] for _ in range(3)] == [[0, 0], [0, 2], [0, 0]]

    for arguments, complaint in [
        ([control, "kind=oom"], f"is the folder of several processes ({', '.join(sorted(pids))}). Say which"),
        (
            [control, "rank=2 kind=oom"],
            "Nobody takes the fault: it is meant for rank 2, and this process is rank",
        ),
        ([pids[0], "rank=1 kind=oom"], "Nobody takes the fault: it is meant for rank 1"),
        (
            [pids[0], "kind=burn"],
            f"Process {pids[0]} refuses the fault: kind must be sticky, ecc, device-lost",
        ),
        ([pids[0], "kind=sticky step=3"], "'step' is not known; the keys are kind, rank, call, at"),
    ]:
        with pytest.raises(ChaosError) as caught:
            chaos.main(arguments)
        assert complaint in str(caught.value)
    assert [allocation_of(process) for process in listeners] == [0, 0]

    for process in listeners:
        process.kill()
        process.wait()
    with pytest.raises(ChaosError, match="No process listens in"):
        chaos.main([control, "kind=oom"])
    assert list(Path(control).iterdir()) == [], "what killed processes left is removed"
