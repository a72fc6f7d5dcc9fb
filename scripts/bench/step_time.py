"""What jitckpt costs an optimizer step of examples/train_gpt.py: with it and under plain torchrun, in turn.

    .venv/bin/python scripts/bench/step_time.py [--pairs 30] [--steps 20] [--json]

Two jobs of two softgpu ranks run at the same time, one under `jitckpt run` with jitckpt.init, the other under
torchrun without any of its libraries but softgpu. They take turns: one makes so many steps while the other
waits for its turn and takes no processor time. Prints the median of the ratios, pair by pair.
"""

import argparse
import importlib
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

import torch
from rich.console import Console
from rich.progress import track
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import jitckpt
from jitckpt import device

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 2
LIMIT = timedelta(minutes=3)
WARM_UP_TURNS = 2


def train(way: str, port: int, turns: int, steps: int) -> None:
    """One rank: make `steps` steps whenever it is told to; rank 0 says how long they took."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["train_gpt.py"]
    example = importlib.import_module("train_gpt")
    args = example.parse_arguments()
    args.steps = turns * steps
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    corpus, kinds = example.standard_library()
    text = corpus.to("cuda")
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(example.GPT(kinds, args).to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    if way == "jitckpt":
        jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    for turn in range(turns):
        store.wait([f"{way} {turn}"])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for step in range(turn * steps, (turn + 1) * steps):
            model(example.draw_batch(text, args, step, 0, rank), step, 1).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        store.set(f"{way} {turn} rank {rank}", str((time.perf_counter() - begun) / steps))
    torch.distributed.destroy_process_group()


@contextmanager
def job(way: str, folder: str, port: int, turns: int, steps: int) -> Iterator[None]:
    """Start a job of two ranks; in the end it has to end by itself, and well."""
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
        yield
        status = process.wait(timeout=60)
    finally:
        process.terminate()
        process.wait()
    if status != 0:
        sys.exit(f"The job {way} failed:\n{(path / 'log').read_text()}")


def measure(pairs: int, steps: int) -> list[dict[str, float]]:
    """Return the seconds of a step of both ways, pair by pair; who is first in a pair is drawn."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    turns = WARM_UP_TURNS + pairs
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        job("jitckpt", folder, store.port, turns, steps),
        job("plain", folder, store.port, turns, steps),
    ):
        for turn in track(range(turns), "taking turns", console=Console(stderr=True)):
            pair = {}
            for way in random.sample(("jitckpt", "plain"), 2):
                store.set(f"{way} {turn}", "go")
                done = [f"{way} {turn} rank {rank}" for rank in range(RANKS)]
                store.wait(done)
                pair[way] = max(float(store.get(key)) for key in done)
            found.append(pair)
    return found[WARM_UP_TURNS:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30, help="(default 30)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (default 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of, args.port, args.pairs, args.steps)
        return
    pairs = measure(args.pairs, args.steps)
    ratios = [pair["jitckpt"] / pair["plain"] for pair in pairs]
    found = {way: statistics.median(pair[way] for pair in pairs) for way in ("plain", "jitckpt")}
    found |= {"ratio": statistics.median(ratios), "pairs": len(pairs)}
    found |= dict(zip(("ratio_low", "ratio_high"), statistics.quantiles(ratios, n=4)[::2], strict=True))
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"a step under torchrun: {found['plain'] * 1e3:.2f} ms, with jitckpt: {found['jitckpt'] * 1e3:.2f} ms"
    )
    print(
        f"median of the ratios of {len(pairs)} pairs: {found['ratio']:.4f} "
        f"(middle half {found['ratio_low']:.4f} to {found['ratio_high']:.4f})"
    )


if __name__ == "__main__":
    main()
