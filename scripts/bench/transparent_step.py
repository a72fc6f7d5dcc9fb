"""What transparent mode costs an optimizer step of examples/plain_ddp.py, which knows nothing of it.

    .venv/bin/python scripts/bench/transparent_step.py [--pairs 100] [--steps 10] [--bound] [--threads]
        [--ways transparent,movable] [--json] [-- --width 256 ...]

Four jobs of two softgpu ranks run at the same time: the script with its device direct (under torchrun, with
no library but softgpu), behind the device proxy alone, in transparent mode, and with --no-state-on-device.
They take turns, in an order that is drawn each time: one makes so many steps while the others wait and take
no processor time. What follows -- goes to the script. Prints the medians of the ratios to the direct one,
turn by turn, with their 95 % confidence intervals (bootstrap): of the time of a step, and of the processor
time that all processes of the job take for one, servers, launchers and softgpu's kernels included. With
--threads also what each thread takes of a step: processor time, and how often it began to wait.

--ways gives other ways, of which the first is what the others are compared with. `movable` is transparent
mode with --broken-device move: the ranks reach their store by a relay, so that CRIU can make them anew.

With --bound each rank of each job has one core, with all that it starts: the same for all ways. Else the
scheduler puts the direct job's threads where it likes, and jitckpt keeps each server on one core.
"""

import argparse
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step_time import interval
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

from jitckpt import device

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain_ddp.py"
RANKS = 2
LIMIT = timedelta(minutes=3)
WARM_UP_TURNS = 2
IN_IMAGES = "state in images"
WAYS = ("direct", "proxy", "transparent", IN_IMAGES)
MOVABLE = "movable"
BOUND = "TRANSPARENT_STEP_BOUND"  # in the ranks' environment: each has one core
PROGRAM = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]


@dataclass
class Used:
    """By a job's processes until now, or from one time to another."""

    processor: float = 0.0  # seconds, also of threads that have ended
    seconds: Counter[str] = field(default_factory=Counter)  # by thread
    waits: Counter[str] = field(default_factory=Counter)  # how often it has begun to wait

    @staticmethod
    def by(root: int) -> "Used":
        """Return what a process and all that it has started have used."""
        used, left = Used(), [root]
        while left:
            process = left.pop()
            try:
                used.processor += time.clock_gettime(~process << 3 | 2)  # as clock_getcpuclockid(3) has it
                role = role_of(process)
            except (FileNotFoundError, ProcessLookupError, OSError):
                continue  # it has ended
            for task in Path(f"/proc/{process}/task").iterdir():
                try:
                    thread = f"{role}: {(task / 'comm').read_text().strip()}"
                    used.seconds[thread] += int((task / "schedstat").read_text().split()[0]) / 1e9  # type: ignore[assignment]
                    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                    used.waits[thread] += int(status["voluntary_ctxt_switches"])
                    left += map(int, (task / "children").read_text().split())
                except (FileNotFoundError, ProcessLookupError):
                    continue
        return used

    def since(self, before: "Used") -> "Used":
        return Used(
            self.processor - before.processor, self.seconds - before.seconds, self.waits - before.waits
        )


def role_of(process: int) -> str:
    if "proxy-server" in os.readlink(f"/proc/{process}/exe"):
        return "server"
    return "rank" if b"\0LOCAL_RANK=" in Path(f"/proc/{process}/environ").read_bytes() else "launcher"


@dataclass(frozen=True)
class Turn:
    """Of one way: seconds of a step of the slower rank, and what the steps of the turn have used."""

    seconds: float
    used: Used


def train(way: str, port: int, turns: int, steps: int, options: list[str]) -> None:
    """One rank: run the example, which makes `steps` steps whenever it is told to."""
    if os.environ.get(BOUND):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    rank = os.environ["RANK"]
    state = {"step": 0, "begun": 0.0}

    def stepped(*_: object) -> None:
        turn, rest = divmod(state["step"], steps)
        state["step"] += 1
        if rest == 0:  # the first step of all begins no turn: its end does
            torch.cuda.synchronize()
            if turn > 0:
                took = (time.perf_counter() - state["begun"]) / steps
                store.set(f"{way} {turn - 1} rank {rank}", json.dumps(took))
            else:
                store.set(f"{way} rank {rank}", "here")
            if turn < turns:
                store.wait([f"{way} {turn}"])
            state["begun"] = time.perf_counter()

    register_optimizer_step_post_hook(stepped)
    sys.argv = [str(EXAMPLE), "--steps", str(turns * steps + 1), *options]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@contextmanager
def job(way: str, folder: str, options: list[str]) -> Iterator[int]:
    """Start a job of two ranks, and tell its process; in the end it has to end by itself, and well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = dict(os.environ)
    if way in ("transparent", IN_IMAGES, MOVABLE):
        launcher = [*PROGRAM, "run", "--mode", "transparent", "--device", "softgpu", "--warm-spares", "0"]
        launcher += ["--no-state-on-device"] if way == IN_IMAGES else []
        launcher += ["--broken-device", "move"] if way == MOVABLE else []
    elif way == "proxy":
        launcher = [*PROGRAM, "exec", "--device", "softgpu", "--proxy", "--", *torchrun]
    else:
        launcher = torchrun
        environment |= device.device_environment("softgpu", RANKS, device.LIBRARY_DIR, environment)
        libraries = environment["LD_PRELOAD"].split(":")
        environment["LD_PRELOAD"] = ":".join(one for one in libraries if not one.endswith("/libjitckpt.so"))
    command = [*launcher, "--nproc-per-node", str(RANKS), __file__, "--rank-of", way, *options]
    path = Path(folder, way)
    path.mkdir()
    with open(path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=path, env=environment, stdout=log, stderr=log)
    try:
        yield process.pid
        status = process.wait(timeout=60)
    except Exception:
        end = (path / "log").read_text()[-4000:]
        print(f"The job {way} (status {process.poll()}) said last:\n{end}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait()
    if status != 0:
        sys.exit(f"The job {way} failed:\n{(path / 'log').read_text()}")


def measure(ways: list[str], turns: int, steps: int, options: list[str]) -> list[dict[str, Turn]]:
    """Return of each turn what each way took."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    own = ["--port", str(store.port), "--pairs", str(turns), "--steps", str(steps), "--", *options]
    found = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as jobs:
        processes = {way: jobs.enter_context(job(way, folder, own)) for way in ways}
        for turn in track(range(turns), "taking turns", console=Console(stderr=True)):
            taken: dict[str, Turn] = {}
            for way in random.sample(ways, len(ways)):
                done = [f"{way} {turn} rank {rank}" for rank in range(RANKS)]
                if turn == 0:  # they have come to their first turns
                    store.wait([f"{way} rank {rank}" for rank in range(RANKS)])
                before = Used.by(processes[way])
                store.set(f"{way} {turn}", "go")
                store.wait(done)
                used = Used.by(processes[way]).since(before)
                taken[way] = Turn(max(json.loads(store.get(key)) for key in done), used)
            if turn >= WARM_UP_TURNS:
                found.append({way: taken[way] for way in ways})
    return found


def summary(found: list[dict[str, Turn]], steps: int) -> dict[str, Any]:
    """Return of each way the medians, the intervals of their ratios to the first one, and the threads'."""
    told: dict[str, Any] = {}
    for way in found[0]:
        turns = [turn[way] for turn in found]
        first = [turn[next(iter(told), way)] for turn in found]
        names = sorted({name for turn in turns for name in turn.used.waits | turn.used.seconds})
        told[way] = {
            "seconds": statistics.median(one.seconds for one in turns),
            "processor": statistics.median(one.used.processor for one in turns) / steps,
            "ratio": interval([one.seconds / other.seconds for one, other in zip(turns, first, strict=True)]),
            "processor_ratio": interval(
                [one.used.processor / other.used.processor for one, other in zip(turns, first, strict=True)]
            ),
            "threads": {
                name: {
                    "seconds": statistics.median(one.used.seconds[name] for one in turns) / steps,
                    "waits": statistics.median(one.used.waits[name] for one in turns) / steps,
                }
                for name in names
            },
        }
    return told


def show(told: dict[str, Any], threads: bool) -> None:
    first = next(iter(told))
    for way, one in told.items():
        ratio, processor = (
            f"{middle:.3f} ({low:.3f} to {high:.3f})"
            for middle, low, high in (one["ratio"], one["processor_ratio"])
        )
        print(
            f"a step, {way}: {one['seconds'] * 1e3:.2f} ms, {ratio} of {first}; "
            f"processor time {one['processor'] * 1e3:.2f} ms, {processor}"
        )
    if not threads:
        return
    table = Table("both ranks, of a step", *told)
    for name in sorted({name for one in told.values() for name in one["threads"]}):
        cells = []
        for one in told.values():
            thread = one["threads"].get(name)
            cells.append(f"{thread['seconds'] * 1e6:.0f} us, {thread['waits']:.1f} waits" if thread else "")
        table.add_row(name, *cells)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100, help="turns that count (default 100)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default 10)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}, {MOVABLE}")
    parser.add_argument("--bound", action="store_true", help="give each rank of each way one core")
    parser.add_argument("--threads", action="store_true", help="print what each thread takes, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="of the example")
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of, args.port, args.pairs, args.steps, args.options)
        return
    if args.bound:
        os.environ[BOUND] = "1"
    ways = args.ways.split(",")
    if unknown := set(ways) - {*WAYS, MOVABLE}:
        parser.error(f"unknown ways: {', '.join(sorted(unknown))}")
    found = measure(ways, WARM_UP_TURNS + args.pairs, args.steps, args.options)
    told = summary(found, args.steps)
    print(json.dumps({"ways": told, "pairs": len(found)})) if args.json else show(told, args.threads)


if __name__ == "__main__":
    main()
