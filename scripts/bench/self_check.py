"""What the self-check after the first steps costs, on models of several sizes.

    jitckpt exec --device softgpu --devices 1 -- python scripts/bench/self_check.py [--mb 1 100 1000]

For each size processes with the check, with all of it (as `jitckpt verify` makes it) and without it train in
turn: layers of 1 MB of parameters each, with AdamW, so the whole state is three times as much. Prints, of the
longest check, how long the training's thread was held up and how long the other thread took; what the copies
made in jitckpt.init took; how much more memory a process had at its most; and the time of a step after the
checks over that without. Medians of the runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jitckpt
from jitckpt.events import read_events
from jitckpt.wire import environment
from jitckpt.worker.self_check.checker import CHECKED_STEPS
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)
from jitckpt.worker.self_check.fresh_copy import FreshCopy

WAYS = {"without": NO_SELF_CHECK, "sampled": SAMPLED_SELF_CHECK, "full": FULL_SELF_CHECK}
LEAST_MB_TIMED = 1000  # steps of a small model are many
WIDTH = 512  # so a layer has 1 MB


def train(megabytes: int, steps: int) -> None:
    """Be one of the processes; print what it took as JSON."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(megabytes))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    copying = [0.0]
    make = FreshCopy.__init__

    def timed(self: FreshCopy, **objects: Any) -> None:
        begun = time.perf_counter()
        make(self, **objects)
        copying[0] = time.perf_counter() - begun

    FreshCopy.__init__ = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        job = jitckpt.init(checkpoint_dir=folder, model=model, optimizer=optimizer)
        times = []
        for step in range(CHECKED_STEPS[-1] + 3 + steps):
            begun = time.perf_counter()
            model(torch.ones(4, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if step >= CHECKED_STEPS[-1] + 3:
                times.append(time.perf_counter() - begun)
        job.close()
        events, _ = read_events(Path(folder))
    most = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    checks = [event for event in events if event["event"] == "self_check"]
    assert all(check["step"] and not check["differences"] and not check["skipped"] for check in checks), (
        checks
    )
    result = {
        "init": copying[0],
        "held_up": max((check["held_up"] for check in checks), default=0.0),
        "seconds": max((check["seconds"] for check in checks), default=0.0),
        "compared": max((check["bytes"] for check in checks), default=0) / 1e6,
        "memory": int(most.split()[1]) * 1024 / 1e6,
        "step": statistics.median(times),
    }
    print(json.dumps(result))


def measure(megabytes: int, way: str, steps: int) -> dict[str, float]:
    steps = max(steps, LEAST_MB_TIMED // megabytes)
    command = [sys.executable, __file__, "--train", str(megabytes), "--steps", str(steps)]
    variables = os.environ | {environment.SELF_CHECK.name: WAYS[way], "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 100, 1000], help="of parameters")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="that are timed, at least")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.steps)
        return
    for megabytes in args.mb:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.runs):
            for way in WAYS:
                runs[way].append(measure(megabytes, way, args.steps))
        without = middle(runs["without"])
        for way in ("sampled", "full"):
            found = middle(runs[way])
            print(
                f"{megabytes} MB, {way}: {found['compared']:.1f} MB compared; the training held up for "
                f"{found['held_up'] * 1e3:.1f} ms, the other thread's time {found['seconds']:.2f} s; "
                f"the copies in init {found['init'] * 1e3:.1f} ms, "
                f"memory +{found['memory'] - without['memory']:.0f} MB; a step afterwards "
                f"{found['step'] * 1e3:.1f} ms, {found['step'] / without['step']:.3f} of that without",
                flush=True,
            )


def middle(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
