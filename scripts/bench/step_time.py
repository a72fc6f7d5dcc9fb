"""What jitckpt's hooks cost an optimizer step of examples/train_gpt.py: with them and without, in turn.

    .venv/bin/python scripts/bench/step_time.py [--pairs 300] [--steps 2] [--json]

One job of two softgpu ranks under `jitckpt run` makes a few steps with jitckpt's hooks in their places, and
as many with the hooks taken away as if jitckpt.init had not been called; which comes first is drawn anew for
each such pair of turns. So both are made by the same processes within a second: what else differs from job
to job (where memory lies, which core a process runs on) and from hour to hour cancels. Prints the median of
the pairs' differences with its 95 % confidence interval (bootstrap): of the time of a step; of the processor
time that both ranks take for one, softgpu's kernels included; and of the thread that trains alone. What it
takes inside of the hooks is measured there as well: that lacks what they enqueue for the device and what they
drive out of the caches, but is the surest.

What is there with and without hooks is in none of these: the processor time of the library's threads and of
the launcher, which is printed beside, and the library's part of each intercepted call (interposed_call.py).
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt_training import GptTraining

import jitckpt
from jitckpt.worker.job import Job
from jitckpt.worker.protection import Protection

RANKS = 2
WARM_UP_PAIRS = 5
WAYS = ("without", "with")
# How a quantity of a step is made of those of its ranks, where not as their mean.
TOGETHER: dict[str, Callable[[Sequence[float]], float]] = {"time": max, "processor": sum}
RESAMPLED = 2000
# What goes on with hooks and without: of which process, and how the threads' names begin.
BOTH_WAYS = {"library": ("self", "jitckpt"), "launcher": (str(os.getppid()), "")}

Rank = list[dict[str, dict[str, float]]]  # of each pair and way: seconds of a step, by what is measured


class Hooks:
    """Those of a job, to be taken away and put back; counts the time that they take."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job._protection, Protection)
        self._outside = job._protection._outside
        self.seconds = 0.0  # of this thread's processor time
        self._places: list[tuple[dict[int, Any], int, Callable[..., Any]]] = []
        for handle in job._protection._hooks._handles:
            hooks = handle.hooks_dict_ref()
            assert hooks is not None
            self._places.append((hooks, handle.id, self._timed(hooks[handle.id])))

    def take_away(self) -> None:
        for hooks, number, _ in self._places:
            hooks.pop(number, None)

    def put_back(self) -> None:
        for hooks, number, hook in self._places:
            hooks[number] = hook
        # Else steps that no hook has seen are changes outside of the steps, and are looked for from then on.
        self._outside._look_from_now()

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = time.thread_time()
            result = hook(*args)
            self.seconds += time.thread_time() - begun
            return result

        return timed


def threads_seconds(pid: str, name: str) -> float:
    """Return the processor time that the threads of a process have taken whose names begin so."""
    found = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(name):
                found += int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


def train(pairs: int, steps: int, results: Path) -> None:
    """One rank: make `steps` steps of each way in turn, and write down what each took."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    turns = 2 * (WARM_UP_PAIRS + pairs)
    training = GptTraining(turns * steps)
    model, optimizer = training.model, training.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=turns * steps)
    hooks = Hooks(jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler))
    chance, step, found = random.Random(0), 0, []
    for _ in range(WARM_UP_PAIRS + pairs):
        pair = {}
        for way in chance.sample(WAYS, 2):
            hooks.put_back() if way == "with" else hooks.take_away()
            torch.distributed.barrier()
            torch.cuda.synchronize()
            hooks.seconds = 0.0
            other = {what: threads_seconds(*threads) for what, threads in BOTH_WAYS.items()}
            begun, processor, thread = time.perf_counter(), time.process_time(), time.thread_time()
            for _ in range(steps):
                training.backward(step)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
            torch.cuda.synchronize()
            took = {
                "time": time.perf_counter() - begun,
                "processor": time.process_time() - processor,
                "thread": time.thread_time() - thread,
                "inside": hooks.seconds,
            }
            for what, threads in BOTH_WAYS.items():
                took[what] = threads_seconds(*threads) - other[what]
            pair[way] = {what: seconds / steps for what, seconds in took.items()}
        found.append(pair)
    hooks.put_back()
    (results / f"rank-{rank}.json").write_text(json.dumps(found[WARM_UP_PAIRS:]))
    torch.distributed.destroy_process_group()


def measure(pairs: int, steps: int) -> list[Rank]:
    """Run the job; return what each rank wrote down. It has to end by itself, and well."""
    command = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", "run"]
    # No spares: they load torch once in the life of a job, which is no step's cost.
    command += ["--standalone", "--device", "softgpu", "--nproc-per-node", str(RANKS), "--warm-spares", "0"]
    command += [__file__, "--pairs", str(pairs), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [*command, "--train", folder], cwd=folder, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            sys.exit(f"The job failed:\n{ended.stdout}{ended.stderr}")
        return [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def interval(values: Sequence[float]) -> list[float]:
    """Return the median and, by bootstrap, its 95 % confidence interval."""
    chance = np.random.default_rng(0)
    drawn = chance.choice(np.asarray(values), (RESAMPLED, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return [float(np.median(values)), float(low), float(high)]


def summary(ranks: list[Rank]) -> dict[str, Any]:
    """Return for each quantity the medians of both ways and the interval of the differences.

    The time is that of the slower rank, the processor time that of both; all else is the ranks' mean. Of
    threads that sleep through most turns the means are returned, and no difference.
    """
    found: dict[str, Any] = {"pairs": len(ranks[0])}
    for what in ranks[0][0]["with"]:
        join = TOGETHER.get(what, statistics.fmean)
        ways = {
            way: [join([one[way][what] for one in both]) for both in zip(*ranks, strict=True)] for way in WAYS
        }
        if what in BOTH_WAYS:
            found[what] = {way: statistics.fmean(values) for way, values in ways.items()}
            continue
        found[what] = {way: statistics.median(values) for way, values in ways.items()}
        found[what]["difference"] = interval(
            [b - a for a, b in zip(ways["without"], ways["with"], strict=True)]
        )
    return found


def show(found: dict[str, Any]) -> None:
    print(f"{found['pairs']} pairs; of a step:")
    whole = {"time": "time", "processor": "processor time of both ranks"}
    for key, what in whole.items():
        without = found[key]["without"]
        middle, low, high = (100 * one / without for one in found[key]["difference"])
        more = f"{middle:+.2f} % with ({low:+.2f} to {high:+.2f})"
        print(f"{what}: {without * 1e3:.2f} ms without the hooks, {more}")
    parts = {
        "thread": "processor time of a rank's training thread, with over without",
        "inside": "the same inside of the hooks",
    }
    for key, what in parts.items():
        middle, low, high = (1e6 * one for one in found[key]["difference"])
        print(f"{what}: {middle:.0f} us ({low:.0f} to {high:.0f})")
    library, launcher = (1e6 * statistics.fmean(found[key].values()) for key in BOTH_WAYS)
    print(f"both ways, processor time: a rank's library threads {library:.0f} us, launcher {launcher:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=300, help="of turns (default 300)")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.pairs, args.steps, args.train)
        return
    found = summary(measure(args.pairs, args.steps))
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
