"""What jitckpt costs an optimizer step of examples/train_gpt.py: with it and under plain torchrun, in turn.

    .venv/bin/python scripts/bench/step_time.py [--jobs 7] [--pairs 8] [--steps 20] [--json]

Two jobs of two softgpu ranks run at the same time, one under `jitckpt run` with jitckpt.init, the other under
torchrun without any of its libraries but softgpu. They take turns: one makes so many steps while the other
waits for its turn and takes no processor time. Prints the medians of the ratios, pair by pair: of the time of
a step, and of the processor time that both ranks take for one, which says something on a busy machine too.
The launchers' processor time, which is none of the ranks', is printed beside.

Two processes of the same job differ in speed as well, by where their memory lies and on which core they run,
and keep that difference as long as they live. So all is done `--jobs` times with new processes, and each
one's median is printed: they tell how sure the figure is.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from gpt_training import GptTraining
from rich.console import Console
from rich.progress import track
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import jitckpt
from jitckpt import device

RANKS = 2
LIMIT = timedelta(minutes=3)
WARM_UP_TURNS = 2
WAYS = ("plain", "jitckpt")


def train(way: str, port: int, turns: int, steps: int) -> None:
    """One rank: make `steps` steps whenever it is told to; rank 0 says how long they took."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    training = GptTraining(turns * steps)
    model, optimizer = training.model, training.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=turns * steps)
    if way == "jitckpt":
        jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    for turn in range(turns):
        store.wait([f"{way} {turn}"])
        torch.cuda.synchronize()
        begun, processor = time.perf_counter(), time.process_time()
        for step in range(turn * steps, (turn + 1) * steps):
            training.backward(step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        took = [(time.perf_counter() - begun) / steps, (time.process_time() - processor) / steps]
        store.set(f"{way} {turn} rank {rank}", json.dumps(took))
    torch.distributed.destroy_process_group()


@contextmanager
def job(way: str, folder: str, port: int, turns: int, steps: int) -> Iterator[int]:
    """Start a job of two ranks, yield its launcher's pid; in the end it has to end by itself, and well."""
    environment = dict(os.environ)
    environment |= device.device_environment("softgpu", RANKS, device.LIBRARY_DIR, environment)
    if way == "jitckpt":
        launcher = ["-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", "run"]
        # No spares: they load torch once in the life of a job, which is no step's cost.
        launcher += ["--device", "softgpu", "--warm-spares", "0"]
    else:
        libraries = environment["LD_PRELOAD"].split(":")
        environment["LD_PRELOAD"] = ":".join(one for one in libraries if not one.endswith("/libjitckpt.so"))
        launcher = ["-m", "torch.distributed.run"]
    command = [sys.executable, *launcher, "--standalone", "--nproc-per-node", str(RANKS), __file__]
    command += ["--rank-of", way, "--port", str(port), "--pairs", str(turns), "--steps", str(steps)]
    path = Path(folder, way)
    path.mkdir()
    with open(path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=path, env=environment, stdout=log, stderr=log)
    try:
        yield process.pid
        status = process.wait(timeout=60)
    finally:
        process.terminate()
        process.wait()
    if status != 0:
        sys.exit(f"The job {way} failed:\n{(path / 'log').read_text()}")


def processor_seconds(pid: int) -> float:
    """Return what a process has taken so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(pairs: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of a step of both ways, pair by pair; who is first in a pair is drawn.

    "time": of the slower rank; "processor": of both ranks together; "launcher": of each job's launcher, one
    figure for all pairs.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    turns = WARM_UP_TURNS + pairs
    found: dict[str, list[dict[str, float]]] = {"time": [], "processor": [], "launcher": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        job("jitckpt", folder, store.port, turns, steps) as ours,
        job("plain", folder, store.port, turns, steps) as plain,
    ):
        launchers = {"jitckpt": ours, "plain": plain}
        before: dict[str, float] = {}
        for turn in track(range(turns), "taking turns", console=Console(stderr=True)):
            if turn == WARM_UP_TURNS:
                before = {way: processor_seconds(pid) for way, pid in launchers.items()}
            seconds, processor = {}, {}
            for way in random.sample(WAYS, 2):
                store.set(f"{way} {turn}", "go")
                done = [f"{way} {turn} rank {rank}" for rank in range(RANKS)]
                store.wait(done)
                took = [json.loads(store.get(key)) for key in done]
                seconds[way], processor[way] = max(one[0] for one in took), sum(one[1] for one in took)
            if turn >= WARM_UP_TURNS:
                found["time"].append(seconds)
                found["processor"].append(processor)
        found["launcher"] = [
            {way: (processor_seconds(pid) - before[way]) / pairs / steps for way, pid in launchers.items()}
        ]
    return found


def summary(jobs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians of both ways and of the pairs' ratios, what the middle half of these is, and each
    job's median.
    """
    pairs = [pair for job in jobs for pair in job]
    ratios = [[pair["jitckpt"] / pair["plain"] for pair in job] for job in jobs]
    every = [ratio for job in ratios for ratio in job]
    found: dict[str, Any] = {way: statistics.median(pair[way] for pair in pairs) for way in WAYS}
    found |= {"ratio": statistics.median(every), "pairs": len(every)}
    found |= {"jobs": sorted(statistics.median(job) for job in ratios)}
    return found | dict(zip(("ratio_low", "ratio_high"), statistics.quantiles(every, n=4)[::2], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=7, help="of each way, one after the other (default 7)")
    parser.add_argument("--pairs", type=int, default=8, help="of turns of a job (default 8)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (default 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of, args.port, args.pairs, args.steps)
        return
    measured = [measure(args.pairs, args.steps) for _ in range(args.jobs)]
    found = summary([job["time"] for job in measured])
    found["processor"] = summary([job["processor"] for job in measured])
    found["launcher"] = {
        way: statistics.median(job["launcher"][0][way] for job in measured) for way in reversed(WAYS)
    }
    if args.json:
        print(json.dumps(found))
        return
    for what, one in {"a step": found, "processor time of its two ranks": found["processor"]}.items():
        print(
            f"{what}, under torchrun: {one['plain'] * 1e3:.2f} ms, with jitckpt: "
            f"{one['jitckpt'] * 1e3:.2f} ms\n    median of the ratios of {one['pairs']} pairs: "
            f"{one['ratio']:.4f} (middle half {one['ratio_low']:.4f} to {one['ratio_high']:.4f})\n"
            f"    each job's median: {' '.join(f'{ratio:.4f}' for ratio in one['jobs'])}"
        )
    launcher = ", ".join(f"{way} {seconds * 1e6:.0f} us" for way, seconds in found["launcher"].items())
    print(f"the launcher's processor time a step: {launcher}")


if __name__ == "__main__":
    main()
