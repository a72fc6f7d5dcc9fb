"""Signals to all processes of a job at once, as scancel and `srun --signal` send them."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from launcher import JITCKPT, JITCKPT_RUN, LIMIT, Launcher, until_told

SCRIPT = """
import hashlib, os, time
from pathlib import Path
import torch
from torch import nn
import jitckpt

SIGNALLED = Path("signalled")
STEPS = 60 if SIGNALLED.exists() else 300  # it is not over before the signal

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8 * STEPS
    def __getitem__(self, number): return torch.full((16,), number / 2400)

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 2).cuda())
    optimizer = torch.optim.Adam(model.parameters())
    job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer)
    start = job.restore()
    os.write(1, f"rank {rank} begins after step {start}\\n".encode())
    loader = torch.utils.data.DataLoader(Data(), 8, num_workers=2, CONTEXT)
    for step, batch in enumerate(loader):
        if step >= start:
            model(batch.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(1, f"step {step}\\n".encode())
            if not SIGNALLED.exists():
                time.sleep(0.1)
    digest = hashlib.sha256(repr([value.tolist() for value in model.parameters()]).encode())
    os.write(1, f"rank {rank} ends with {digest.hexdigest()}\\n".encode())
    torch.distributed.destroy_process_group()
"""


def send_to_all(launcher: psutil.Process, number: int) -> int:
    """Send the signal to every process of the job; return to how many."""
    everybody = [launcher, *launcher.children(recursive=True)]
    for process in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return len(everybody)


@pytest.fixture
def command(request: pytest.FixtureRequest, launcher: Launcher) -> list[str]:
    context, mode = getattr(request, "param", ("fork", "user"))
    script = launcher.script(SCRIPT.replace("CONTEXT", f"multiprocessing_context={context!r}"))
    options = ["--device", "softgpu", "--nproc-per-node", "2", "--warm-spares", "1", "--mode", mode]
    return [*JITCKPT_RUN, *options, script]


def run_until(launcher: Launcher, command: list[str], line: str) -> "subprocess.Popen[str]":
    process = launcher.start(*command)
    assert process.stdout is not None
    while line not in (read := process.stdout.readline()):
        assert read
    return process


def ends(out: str) -> list[str]:
    found = sorted(re.findall(r"rank \d ends with \w+", out))
    assert len(found) == 2, out
    return found


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (("fork", "user"), signal.SIGTERM),
        (("spawn", "user"), signal.SIGTERM),
        (("fork", "user"), signal.SIGINT),
        (("fork", "transparent"), signal.SIGTERM),
    ],
    indirect=["command"],
)
def test_the_state_is_saved_and_the_same_command_goes_on(
    launcher: Launcher, command: list[str], number: int
) -> None:
    process = run_until(launcher, command, "step 30")
    events = launcher.directory / "ckpt" / "events.jsonl"
    launcher.wait_until(lambda: "spares_started" in events.read_text())
    # Agent, guardian, template, ranks, loaders; in transparent mode the ranks' servers, too.
    assert send_to_all(psutil.Process(process.pid), number) >= (10 if "transparent" in command else 8)
    interrupted = launcher.finish(process)
    (launcher.directory / "signalled").touch()
    assert interrupted.status == 75, interrupted.err
    saved = re.search(r"The state after step (\d+) lies in", interrupted.err)
    assert saved is not None, interrupted.err
    again = launcher.succeed(*command)
    assert f"rank 0 begins after step {saved[1]}" in again
    (launcher.directory / "ckpt").rename(launcher.directory / "before")
    assert ends(again) == ends(launcher.run(*command).out)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_to_all_saves_and_the_training_goes_on(
    launcher: Launcher, command: list[str], number: signal.Signals
) -> None:
    process = run_until(launcher, command, "step 30")
    send_to_all(psutil.Process(process.pid), number)
    said = until_told(process, "will be saved")
    (launcher.directory / "signalled").touch()
    ended = launcher.finish(process)
    assert ended.status == 0, said + ended.err
    saved = re.search(rf"{number.name}: the state after step (\d+) will be saved", said)
    assert saved is not None, said
    assert (launcher.directory / "ckpt" / f"step-{int(saved[1]):010}").is_dir()
    assert "Restart" not in ended.err
    ends(ended.out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_launcher_that_still_waits_for_others_ends_at_once_and_leaves_nothing(
    launcher: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    """Its agent has no signals in its hands yet; the job's store is at an address that nobody has."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "192.0.2.1:2950", "--rdzv-id", "j"]
    command = [*JITCKPT, "run", "--device", "softgpu", *meet, launcher.script("raise AssertionError")]
    command = ["env", "--default-signal", *command]  # the tests themselves may run under nohup
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, text=True) as waits:
        end = time.monotonic() + LIMIT
        while not any(folder.glob("jitckpt-launcher-*")):
            assert waits.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        waits.send_signal(number)
        try:
            status = waits.wait(LIMIT)
        finally:
            waits.kill()
    assert status == 128 + number
    assert not list(folder.iterdir())
