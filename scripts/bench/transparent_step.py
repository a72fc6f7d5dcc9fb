"""What transparent mode costs an optimizer step of examples/plain_ddp.py, which knows nothing of it.

    .venv/bin/python scripts/bench/transparent_step.py [--pairs 15] [--steps 20] [--json] [-- --width 256 ...]

Four jobs of two softgpu ranks run at the same time: the script with its device direct (under torchrun, with
no library but softgpu), behind the device proxy alone, in transparent mode, and with --state-on-device. They
take turns: one makes so many steps while the others wait and take no processor time. What follows -- goes to
the script. Prints the medians of the ratios to the direct one, turn by turn.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

from jitckpt import device

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain_ddp.py"
RANKS = 2
LIMIT = timedelta(minutes=3)
WARM_UP_TURNS = 2
STATE_STAYS = "state on device"
WAYS = ("direct", "proxy", "transparent", STATE_STAYS)
PROGRAM = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]


def train(way: str, port: int, turns: int, steps: int, options: list[str]) -> None:
    """One rank: run the example, which makes `steps` steps whenever it is told to."""
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
            if turn < turns:
                store.wait([f"{way} {turn}"])
            state["begun"] = time.perf_counter()

    register_optimizer_step_post_hook(stepped)
    sys.argv = [str(EXAMPLE), "--steps", str(turns * steps + 1), *options]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@contextmanager
def job(way: str, folder: str, options: list[str]) -> Iterator[None]:
    """Start a job of two ranks; in the end it has to end by itself, and well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = dict(os.environ)
    if way in ("transparent", STATE_STAYS):
        launcher = [*PROGRAM, "run", "--mode", "transparent", "--device", "softgpu", "--warm-spares", "0"]
        launcher += ["--state-on-device"] if way == STATE_STAYS else []
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
        yield
        status = process.wait(timeout=60)
    finally:
        process.terminate()
        process.wait()
    if status != 0:
        sys.exit(f"The job {way} failed:\n{(path / 'log').read_text()}")


def measure(turns: int, steps: int, options: list[str]) -> list[dict[str, float]]:
    """Return the seconds of a step of each way, turn by turn, of the slower rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    own = ["--port", str(store.port), "--pairs", str(turns), "--steps", str(steps), "--", *options]
    found = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as jobs:
        for way in WAYS:
            jobs.enter_context(job(way, folder, own))
        for turn in track(range(turns), "taking turns", console=Console(stderr=True)):
            seconds = {}
            for way in random.sample(WAYS, len(WAYS)):
                store.set(f"{way} {turn}", "go")
                done = [f"{way} {turn} rank {rank}" for rank in range(RANKS)]
                store.wait(done)
                seconds[way] = max(json.loads(store.get(key)) for key in done)
            if turn >= WARM_UP_TURNS:
                found.append(seconds)
    return found


def summary(found: list[dict[str, float]]) -> dict[str, Any]:
    """Return of each way the median, that of the ratios to the direct one, and their middle half."""
    told: dict[str, Any] = {}
    for way in WAYS:
        ratios = [seconds[way] / seconds["direct"] for seconds in found]
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(seconds[way] for seconds in found)
        told[way] = {"seconds": median, "ratio": statistics.median(ratios), "low": low, "high": high}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15, help="turns that count (default 15)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (default 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="of the example")
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of, args.port, args.pairs, args.steps, args.options)
        return
    found = measure(WARM_UP_TURNS + args.pairs, args.steps, args.options)
    told = summary(found)
    if args.json:
        print(json.dumps({"ways": told, "pairs": len(found)}))
        return
    for way, one in told.items():
        print(
            f"a step, {way}: {one['seconds'] * 1e3:.2f} ms, {one['ratio']:.3f} of direct "
            f"(middle half of {len(found)} turns {one['low']:.3f} to {one['high']:.3f})"
        )


if __name__ == "__main__":
    main()
