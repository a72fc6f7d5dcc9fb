"""A recovery with jitckpt beside plain torchrun with torch.save, and with DCP's async_save, on the same work.

    .venv/bin/python scripts/bench/recovery_beside.py [--runs 5] [--save-every 20] [--json]

Two softgpu ranks train six Linear(1024) with AdamW (76 MB of state); rank 1 is killed by SIGKILL in step 150.
Under torchrun the state is saved every so many steps, the newest before the failure is loaded again. Runs of
all ways in turn. Printed are medians of those that recovered, and how many did:

    first step   from SIGKILL until the slowest rank has done a step again
    level        until it has done the step in which the failure came
    redone       steps that had been done before the failure, and were done again
    step         a step before the failure, saving included
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import distributed, nn
from torch.distributed.checkpoint import async_save, load  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import jitckpt

WAYS = ("jitckpt", "torch.save", "async_save")
KILLED_STEP, STEPS = 150, 190
FOLDER = Path("ckpt")
JITCKPT = ["-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]


class TorchSave:
    """Rank 0 writes the whole state into a file that takes the place of the one before."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state, self._path = state, FOLDER / "state.pt"

    def save(self, step: int) -> None:
        if distributed.get_rank() == 0:
            fresh = self._path.with_suffix(".fresh")
            with open(fresh, "wb") as file:
                torch.save(self._state() | {"step": step}, file)
                os.fsync(file.fileno())
            fresh.rename(self._path)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        if not self._path.exists():
            return 0
        saved = torch.load(self._path, map_location="cuda")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])


class AsyncSave:
    """Torch's distributed checkpoint, which copies the state and writes it beside the training."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state
        self._writes: Any = None
        self._group = distributed.new_group(backend="gloo")

    def save(self, step: int) -> None:
        if self._writes is not None:
            self._writes.result()  # torch wants one at a time
        folder = FOLDER / f"step-{step}"
        self._writes = async_save(self._state(), checkpoint_id=folder, process_group=self._group)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        whole = [int(path.parent.name.split("-")[1]) for path in FOLDER.glob("step-*/.metadata")]
        if not whole:
            return 0
        state: dict[str, Any] = dict(
            zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
        )
        load(state, checkpoint_id=FOLDER / f"step-{max(whole)}", process_group=self._group)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return max(whole)


def train(way: str, save_every: int) -> None:
    """One rank. Every step that the device has done gets a line in its log."""
    torch.manual_seed(0)
    distributed.init_process_group("nccl")
    rank = distributed.get_rank()
    torch.cuda.set_device(rank)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).cuda()
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    FOLDER.mkdir(exist_ok=True)
    saver: TorchSave | AsyncSave | None = None
    if way == "jitckpt":
        done = jitckpt.init(checkpoint_dir=FOLDER, model=model, optimizer=optimizer).restore()
    elif way == "torch.save":
        saver = TorchSave(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        done = saver.load(model, optimizer)
    else:
        names = ("model", "optimizer")
        saver = AsyncSave(lambda: dict(zip(names, get_state_dict(model, optimizer), strict=True)))
        done = saver.load(model, optimizer)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(f"steps-{restart}-{rank}.jsonl", "a", buffering=1) as log:
        for step in range(done + 1, STEPS + 1):
            loss = replicated(torch.randn(32, 1024, device="cuda")).square().mean()
            if step == KILLED_STEP and rank == 1 and restart == 0:
                log.write(json.dumps({"killed": time.time()}) + "\n")
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            log.write(json.dumps({"step": step, "time": time.time()}) + "\n")
            if saver is not None and step % save_every == 0:
                saver.save(step)
    distributed.destroy_process_group()


def recover(way: str, save_every: int, limit: float) -> dict[str, float] | None:
    """Run a training with one failure; None if it did not come back within `limit` seconds."""
    softgpu = ["--device", "softgpu"]
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    launcher = [*JITCKPT, "run", *softgpu, "--warm-spares", "1"]
    if way != "jitckpt":
        launcher = [*JITCKPT, "exec", *softgpu, "--", sys.executable, "-m", "torch.distributed.run"]
    script = [__file__, "--rank-of", way, "--save-every", str(save_every)]
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder, "log"), "w") as log:
            process = subprocess.Popen(
                [sys.executable, *launcher, *options, *script],
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGTERM)  # the launcher ends its workers
            process.wait()
        if status != 0:
            ended = f"did not end in {limit:g} s" if status is None else f"ended with status {status}"
            tail = "\n".join(Path(folder, "log").read_text().splitlines()[-30:])
            print(f"A run of {way} {ended}:\n{tail}", file=sys.stderr)
            return None
        logs = {
            (restart, rank): [json.loads(line) for line in path.read_text().splitlines()]
            for path in Path(folder).glob("steps-*.jsonl")
            for _, restart, rank in [path.stem.split("-")]
        }
    return figures(logs)


def figures(logs: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, float]:
    """Return what a recovery took, from the steps of each start and rank; the last start counts."""
    last = max(restart for restart, _ in logs)
    killed = logs["0", "1"][-1]["killed"]
    ranks = [lines for (restart, _), lines in logs.items() if restart == last]
    first = min(line["step"] for lines in ranks for line in lines)
    times = [line["time"] for line in logs["0", "1"] if "time" in line]
    return {
        "first step": max(lines[0]["time"] for lines in ranks) - killed,
        "level": max(line["time"] for lines in ranks for line in lines if line["step"] == KILLED_STEP)
        - killed,
        "redone": KILLED_STEP - first,
        # The first steps of a start warm up.
        "step": (times[-1] - times[9]) / (len(times) - 10),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="of each way (default 5)")
    parser.add_argument("--save-every", type=int, default=20, help="steps, under torchrun (default 20)")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a run (default 120)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rank-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        train(args.rank_of, args.save_every)
        return
    found: dict[str, list[dict[str, float] | None]] = {way: [] for way in WAYS}
    for way in track(WAYS * args.runs, "recovering", console=Console(stderr=True)):
        found[way].append(recover(way, args.save_every, args.limit))
    results = {}
    for way, runs in found.items():
        back = [run for run in runs if run is not None]
        medians = {key: statistics.median(run[key] for run in back) for key in back[0]} if back else {}
        results[way] = medians | {"recovered": len(back), "runs": len(runs)}
    if args.json:
        print(json.dumps(results))
        return
    table = Table("", "first step", "level", "redone", "step", "recovered")
    for way, result in results.items():
        shown = [f"{result[key]:.3f} s" if key in result else "" for key in ("first step", "level", "step")]
        redone = f"{result['redone']:.0f}" if "redone" in result else ""
        count = f"{result['recovered']} of {result['runs']}"
        table.add_row(way, shown[0], shown[1], redone, shown[2], count)
    Console().print(table)


if __name__ == "__main__":
    main()
