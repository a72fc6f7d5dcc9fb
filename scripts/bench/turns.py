"""Jobs of one training that run at the same time and take turns with its steps.

One makes so many steps while the others wait and take no processor time. What else differs from job to job,
and from hour to hour, then hits all alike. The training is a script that knows nothing of it: a hook behind
its optimizer's step waits for the turn.

    python turns.py WAY PORT TURNS STEPS SCRIPT ARGUMENTS...    one rank; its launcher is started by `measure`
"""

import json
import os
import random
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

LIMIT = timedelta(minutes=15)  # finds hangs
WARM_UP_TURNS = 3  # of which transparent mode validates a step in one


@dataclass(frozen=True)
class Turns:
    """So many that count, of so many steps each."""

    number: int
    steps: int

    @property
    def all(self) -> int:
        return WARM_UP_TURNS + self.number

    @property
    def steps_in_all(self) -> int:
        """How many the training has to make: the first one begins no turn, its end does."""
        return self.all * self.steps + 1


@dataclass(frozen=True)
class Way:
    """How a job is started: the command that starts ranks, its environment, and the script's arguments."""

    launcher: Sequence[str]
    environment: Mapping[str, str]
    arguments: Sequence[str]


def train(way: str, port: int, turns: Turns, script: Path, arguments: Sequence[str]) -> None:
    """One rank: run the script, which makes a turn's steps whenever it is told to."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    rank = os.environ["RANK"]
    done, begun = 0, 0.0

    def stepped(*_: object) -> None:
        nonlocal done, begun
        turn, rest = divmod(done, turns.steps)
        done += 1
        if rest != 0:
            return
        torch.cuda.synchronize()
        if turn > 0:
            store.set(
                f"{way} {turn - 1} rank {rank}", json.dumps((time.perf_counter() - begun) / turns.steps)
            )
        else:
            store.set(f"{way} rank {rank}", "here")
        if turn < turns.all:
            store.wait([f"{way} {turn}"])
        begun = time.perf_counter()

    register_optimizer_step_post_hook(stepped)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


@contextmanager
def _job(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Start a job; in the end it has to end by itself, and well."""
    folder.mkdir(parents=True)
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
    try:
        yield
        process.wait(timeout=LIMIT.total_seconds())
    except Exception:
        said = (folder / "err").read_text()[-4000:]
        print(f"The job {folder.name} (status {process.poll()}) said last:\n{said}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait()
    if process.returncode != 0:
        sys.exit(f"The job {folder.name} failed:\n{(folder / 'err').read_text()[-4000:]}")


def measure(
    ways: Mapping[str, Way],
    script: Path,
    ranks: int,
    turns: Turns,
    *,
    folder: Path,
    told: Callable[[str], None],
) -> dict[str, list[float]]:
    """Return of each way the seconds of a step of its slowest rank, turn by turn.

    What a job prints is in FOLDER/WAY/out. told: hears where it is.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    found: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as jobs:
        for name, way in ways.items():
            own = [name, str(store.port), str(turns.number), str(turns.steps), str(script), *way.arguments]
            jobs.enter_context(_job([*way.launcher, __file__, *own], way.environment, folder / name))
        told("the jobs start")
        store.wait([f"{name} rank {rank}" for name in ways for rank in range(ranks)])
        for turn in range(turns.all):
            told(f"turn {turn + 1} of {turns.all}")
            for name in random.sample(list(ways), len(ways)):
                keys = [f"{name} {turn} rank {rank}" for rank in range(ranks)]
                store.set(f"{name} {turn}", "go")
                store.wait(keys)
                if turn >= WARM_UP_TURNS:
                    found[name].append(max(json.loads(store.get(key)) for key in keys))
        told("the jobs end")
    return found


if __name__ == "__main__":
    _name, _port, _number, _steps, _script = sys.argv[1:6]
    train(_name, int(_port), Turns(int(_number), int(_steps)), Path(_script), sys.argv[6:])
