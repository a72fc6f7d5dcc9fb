"""Where the processor time goes that jitckpt takes of a step of examples/train_gpt.py, part by part.

    jitckpt exec --device softgpu --devices 1 -- python scripts/bench/step_cost.py [--turns 10] [--json]

One rank trains in turns with the hooks in place and without them; the library and its threads stay. Times
are of the processor, which other work on the machine disturbs less than it does the clock. The first table
tells what each part takes, called again and again with no training between, in the best of several rounds:
`thread` is the training's own thread, `process` all threads, so the device's too where it is softgpu. In a
training it is more, as the caches hold something else each time. The second table tells what every thread of
the process takes of a step in the training, medians of turns.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpt_training import GptTraining
from rich.console import Console
from rich.table import Table
from step_time import Hooks
from torch.distributed import HashStore  # type: ignore[attr-defined]

import jitckpt

WARM_UP_TURNS = 2
ROUNDS = 20


@dataclass(frozen=True)
class Threads:
    """Of the process, by the threads' names: seconds of processor time, and how often they went to sleep."""

    seconds: dict[str, float]
    sleeps: dict[str, float]

    @staticmethod
    def now() -> "Threads":
        seconds: dict[str, float] = defaultdict(float)
        sleeps: dict[str, float] = defaultdict(float)
        for task in Path("/proc/self/task").iterdir():
            try:
                name = (task / "comm").read_text().strip()
                seconds[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            sleeps[name] += int(status["voluntary_ctxt_switches"])
        return Threads(seconds, sleeps)


class Training:
    """Of examples/train_gpt.py, one rank; makes so many steps when told to."""

    def __init__(self, steps: int, folder: str) -> None:
        torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
        self._gpt = GptTraining(steps)
        model, self._optimizer = self._gpt.model, self._gpt.optimizer
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, T_max=steps)
        self._step = 0
        self.job = jitckpt.init(
            checkpoint_dir=folder, model=model, optimizer=self._optimizer, scheduler=self._scheduler
        )

    def make(self, steps: int) -> None:
        for _ in range(steps):
            self._gpt.backward(self._step)
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad()
            self._step += 1
        torch.cuda.synchronize()


def cost(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return the microseconds of processor time of one call: this thread's, and the whole process's."""
    torch.cuda.synchronize()
    process, thread = time.process_time(), time.thread_time()
    for _ in range(repeats):
        call()
    thread = time.thread_time() - thread
    torch.cuda.synchronize()
    process = time.process_time() - process
    return {"thread": thread / repeats * 1e6, "process": process / repeats * 1e6}


def parts(training: Training, repeats: int) -> dict[str, dict[str, float]]:
    """Return what each part of jitckpt's work in a step takes, called with no training between."""
    protection: Any = training.job._protection
    host, hooks = protection._host, protection._hooks

    def step() -> None:
        hooks._forward_begins(None, ())
        hooks._forward_ends(None, (), None)
        optimizer = host.optimizers[0].optimizer
        hooks._begin(optimizer)
        hooks._end(optimizer)

    def markers() -> None:
        number = protection._native.progress().host_ended + 1
        protection._native.step_begin(number, protection._steps._stream())
        protection._native.step_end(number, protection._steps._stream())

    local = host.local()
    calls: dict[str, Callable[[], object]] = {
        "random numbers": host.random.capture,
        "all that this rank alone knows": host.local,
        "... written to the ring, buffers copied": lambda: protection._own._recorder.write(
            hooks.step, True, local
        ),
        "the optimizer's numbers on the host": host.shared,
        "hyperparameters and schedulers": host.progress,
        "step markers": markers,
        "all hooks of a step": step,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(cost(call, repeats))
    return {
        name: {kind: min(one[kind] for one in costs) for kind in ("thread", "process")}
        for name, costs in found.items()
    }


def compare(training: Training, turns: int, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return, with and without hooks, what each thread takes of a step: microseconds, and sleeps."""
    seen: dict[str, list[dict[str, dict[str, float]]]] = {"with": [], "without": []}
    hooks = Hooks(training.job)
    for turn in range(WARM_UP_TURNS + turns):
        for way in sorted(seen, reverse=turn % 2 == 1):
            before = Threads.now()
            hooks.put_back() if way == "with" else hooks.take_away()
            training.make(steps)
            after = Threads.now()
            microseconds = {
                name: (seconds - before.seconds[name]) / steps * 1e6
                for name, seconds in after.seconds.items()
            }
            sleeps = {name: (count - before.sleeps[name]) / steps for name, count in after.sleeps.items()}
            if turn >= WARM_UP_TURNS:
                seen[way].append({"microseconds": microseconds, "sleeps": sleeps})
    hooks.put_back()
    names = {name for turns_ in seen.values() for one in turns_ for name in one["microseconds"]}
    return {
        way: {
            kind: {name: statistics.median(one[kind].get(name, 0.0) for one in turns_) for name in names}
            | {"all": statistics.median(sum(one[kind].values()) for one in turns_)}
            for kind in ("microseconds", "sleeps")
        }
        for way, turns_ in seen.items()
    }


def show(found: dict[str, Any]) -> None:
    console = Console()
    table = Table("part, us of processor time a step", "thread", "process")
    for name, figures in found["parts"].items():
        table.add_row(name, f"{figures['thread']:.0f}", f"{figures['process']:.0f}")
    console.print(table)
    table = Table("thread", "us a step without", "with", "difference", "sleeps without", "with")
    ways = found["threads"]
    with_, without = ways["with"], ways["without"]
    for name in sorted(with_["microseconds"], key=lambda one: -with_["microseconds"][one]):
        before, after = without["microseconds"][name], with_["microseconds"][name]
        if max(before, after) >= 1:
            sleeps = [f"{way['sleeps'][name]:.1f}" for way in (without, with_)]
            table.add_row(name, f"{before:.0f}", f"{after:.0f}", f"{after - before:+.0f}", *sleeps)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (default 20)")
    parser.add_argument("--repeats", type=int, default=50, help="of each part in a round (default 50)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        training = Training(2 * (WARM_UP_TURNS + args.turns) * args.steps, folder)
        threads = compare(training, args.turns, args.steps)
        found = {"parts": parts(training, args.repeats), "threads": threads}
        training.job.close()
        torch.distributed.destroy_process_group()
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
