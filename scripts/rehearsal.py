"""Runs an example under `jitckpt run`, with or without a failure, and says what came of it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jitckpt.events import FILE_NAME, Event, read_events
from jitckpt.timeline import Recovery, recoveries

ROOT = Path(__file__).resolve().parents[1]
JITCKPT = str(Path(sysconfig.get_path("scripts")) / "jitckpt")
STEP_LINE = re.compile(r"step (\d+) of (\d+)")
RESULT_LINE = re.compile(r"rank (\d+): parameters (\w+) buffers (\w+)")
# In the environment of every process of a run, so that those that it leaves behind are found.
MARK = "JITCKPT_REHEARSAL"


@dataclass(frozen=True)
class Digests:
    """SHA-256 of what one rank ended with."""

    parameters: str
    buffers: str


@dataclass(frozen=True)
class Kill:
    """A SIGKILL from outside to `rank`, `delay` seconds after rank 0 announced that step."""

    rank: int
    step: int
    delay: float


@dataclass(frozen=True)
class Run:
    """One run of an example, from its first process to its last.

    steps: (seconds since the start, step) for each step that rank 0 announced, in order of time.
    digests: by rank. left_behind: what should not be there any more, a text each.
    """

    status: int
    seconds: float
    steps: tuple[tuple[float, int], ...]
    digests: dict[int, Digests]
    events: tuple[Event, ...]
    left_behind: tuple[str, ...]

    @property
    def restarts(self) -> int:
        return max((event["restart"] for event in self.events), default=0)

    @property
    def recoveries(self) -> list[Recovery]:
        return recoveries(self.events)


def run_example(
    example: Path,
    folder: Path,
    arguments: list[str],
    *,
    fault: str | None = None,
    kill: Kill | None = None,
    hang_timeout: float = 60,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    time_limit: float = 300,
) -> Run:
    """Runs `example` on two softgpu ranks, with all its files in `folder`, which must not exist yet.

    fault, hang_timeout: as for `jitckpt run`. on_step(step, steps) is called when rank 0 announces a step.
    Raises TimeoutError after time_limit seconds.
    """
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    checkpoint_dir = folder / "ckpt"
    command = [JITCKPT, "run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu"]
    command += ["--hang-timeout", str(hang_timeout), *(["--fault", fault] if fault else [])]
    command += [str(example), "--checkpoint-dir", str(checkpoint_dir), *arguments]
    mark = f"{MARK}={uuid.uuid4()}"
    environment = {
        MARK: mark.removeprefix(f"{MARK}="),
        "TMPDIR": str(temporary),
        # torch itself makes this folder in TMPDIR and leaves it there.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch-cache"),
    }
    shared_memory = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    deadline = threading.Timer(time_limit, kill_all, (mark,))
    deadline.start()
    announced: list[tuple[float, int]] = []
    digests: dict[int, Digests] = {}
    killers: list[threading.Timer] = []
    try:
        for line in record(process, folder / "output.txt"):
            if match := STEP_LINE.search(line):
                step, steps = int(match[1]), int(match[2])
                announced.append((time.monotonic() - began, step))
                on_step(step, steps)
                if kill is not None and step >= kill.step and not killers:
                    killers.append(threading.Timer(kill.delay, kill_rank, (checkpoint_dir, kill.rank, mark)))
                    killers[0].start()
            for rank, parameters, buffers in RESULT_LINE.findall(line):
                digests[int(rank)] = Digests(parameters, buffers)
        status = process.wait()
    finally:
        for timer in (deadline, *killers):
            timer.cancel()
            timer.join()
        if process.poll() is None:  # we have been interrupted
            kill_all(mark)
            process.wait()
    seconds = time.monotonic() - began
    if seconds > time_limit:
        raise TimeoutError(f"{example.name} did not end in {time_limit:.0f} s, see {folder / 'output.txt'}.")
    left_behind = [f"process {pid}: {name}" for pid, name in processes_with(mark)]
    left_behind += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - shared_memory)]
    left_behind += [str(path) for path in sorted(temporary.rglob("*"))]
    events = read_events(checkpoint_dir)[0] if (checkpoint_dir / FILE_NAME).exists() else []
    return Run(status, seconds, tuple(announced), digests, tuple(events), tuple(left_behind))


def record(process: subprocess.Popen[str], file: Path) -> Iterator[str]:
    """Yields what the process prints, line by line, and writes it to the file, too."""
    assert process.stdout is not None
    with file.open("w") as output:
        for line in process.stdout:
            output.write(line)
            output.flush()
            yield line


def end_in_order_on_sigterm() -> None:
    """Lets SIGTERM unwind the stack as ^C does, so that no run is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def processes_with(mark: str) -> list[tuple[int, str]]:
    """Process id and name of all processes that have this variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((int(entry.name), (entry / "comm").read_text().strip()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended, or it is another user's
    return found


def kill_all(mark: str) -> None:
    for pid, _ in processes_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_rank(checkpoint_dir: Path, rank: int, mark: str) -> None:
    """Sends SIGKILL to the process that was the last to register as this rank, if it still lives."""
    events, _ = read_events(checkpoint_dir)
    registered = [e["pid"] for e in events if e["event"] == "registered" and e["rank"] == rank]
    if registered and registered[-1] in (pid for pid, _ in processes_with(mark)):
        os.kill(registered[-1], signal.SIGKILL)
