"""How long transparent mode takes to recover examples/plain_ddp.py, which knows nothing of it, and for what.

    .venv/bin/python scripts/bench/transparent_recovery.py [--runs 5] [--json] [-- --width 512 ...]

One job of two softgpu ranks is hit again and again late in a step, in each kind's turn. Prints, as medians of
each kind: what it takes from the failure until all ranks go on, the parts of that on the slowest rank, and a
step without a failure; and how long the calls take that are made again, over so many whole steps as they are
of. What follows -- goes to the script.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jitckpt.events import read_events
from jitckpt.faults.injection import parse_fault
from jitckpt.reports.timeline_transparent import transparent_recoveries

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain_ddp.py"
PROGRAM = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
# And the phase in which they come: as late in a step as they can, but not in the optimizer. There a replica's
# state leads on, and no calls are made again.
KINDS = {
    "collective-error": "allreduce",
    "driver-suspect": "allreduce",
    "sticky": "allreduce",
    "proxy-kill": "backward",
}
RANKS = 2
FIRST, EVERY = 15, 6  # the step of the first failure; steps from one to the next, most of them as ever
STEP_SECONDS = "steps.json"  # what each rank writes, with its number before it


def train(options: list[str]) -> None:
    """One rank: run the example and write how long each step took."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends: list[float] = []

    def stepped(*_: object) -> None:
        torch.cuda.synchronize()
        ends.append(time.perf_counter())

    register_optimizer_step_post_hook(stepped)
    sys.argv = [str(EXAMPLE), *options]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    Path(f"{os.environ['RANK']}-{STEP_SECONDS}").write_text(json.dumps(ends))


def recover(runs: int, options: list[str]) -> list[dict[str, Any]]:
    """Run the job; return of each recovery its kind, and the seconds of it, its parts, and a step without."""
    faults = [
        f"rank={number % RANKS} step={FIRST + number * EVERY} phase={KINDS[kind]} kind={kind}"
        for number, kind in enumerate([*KINDS] * runs)
    ]
    command = [
        *PROGRAM,
        "run",
        "--mode",
        "transparent",
        "--device",
        "softgpu",
        "--nproc-per-node",
        str(RANKS),
    ]
    command += ["--checkpoint-dir", "ckpt"]
    for fault in faults:
        command += ["--fault", fault]
    command += [__file__, "--train", "--", "--steps", str(FIRST + len(faults) * EVERY), *options]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            sys.exit(f"The job failed:\n{ended.stderr}")
        ends = [json.loads(Path(folder, f"{rank}-{STEP_SECONDS}").read_text()) for rank in range(RANKS)]
        events, _ = read_events(Path(folder, "ckpt"))
    recoveries = transparent_recoveries(events)
    if len(recoveries) != len(faults) or any(one.state is None for one in recoveries):
        sys.exit(f"{len(faults)} failures led to {len(recoveries)} recoveries:\n{ended.stderr}")
    found = []
    for spec, recovery in zip(map(parse_fault, faults), recoveries, strict=True):
        # The steps from the last failure to this one, but for those that either has a part in.
        own = slice(spec.step - EVERY + 1, spec.step - 2)
        step = max(statistics.median(map(float.__sub__, one[1:][own], one[own])) for one in ends)
        assert recovery.state is not None
        first_time = step * (spec.step - recovery.state)
        found.append({"kind": spec.kind, "all": recovery.seconds, "step": step} | recovery.steps)
        if first_time == 0:
            sys.exit(f"{spec} came so late that no call was made again: choose another phase")
        found[-1]["replay over first time"] = recovery.steps["replay"] / first_time
    return found


def medians(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by kind the median of each figure."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        by_kind[one.pop("kind")].append(one)
    return {
        kind: {key: statistics.median(one[key] for one in ones) for key in ones[0]}
        for kind, ones in by_kind.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="failures of each kind (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="of the example")
    args = parser.parse_args()
    if args.train:
        train(args.options)
        return
    told = medians(recover(args.runs, args.options))
    if args.json:
        print(json.dumps(told))
        return
    table = Table("milliseconds", *told)
    for key in next(iter(told.values())):
        scale = 1 if "over" in key else 1e3
        table.add_row(key, *(f"{one[key] * scale:.2f}" for one in told.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
