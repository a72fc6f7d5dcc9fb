"""Tables 4 to 7 of the paper on just-in-time checkpointing for this machine: its workloads, on softgpu.

    .venv/bin/python scripts/bench/paper_tables.py [--only GPT2-S ...] [--turns 8] [--failures 3] [--moves]
        [--only-moves] [--json] [--record docs/data/workloads.jsonl]

Of each of examples/workloads, as small as they are by default, three jobs train at the same time and take
turns with their steps: without jitckpt, in user-level and in transparent mode. That gives a minibatch's time
and the overhead (medians of pairs of turns). Then ranks are killed in user-level mode, and collectives fail
in transparent mode; with --moves, as root and where CRIU works, a device breaks for good and its rank is made
anew. Every job has to print the losses and end with the model and the optimizer of the one without jitckpt,
bit for bit; else the exit status is 1. What is not installed (transformers, megatron-core) is left out, with
a line.

--record puts what was measured into the file of such records, in place of those of the same workloads; with
--only-moves, which measures Table 6 alone, in place of what stands there of that.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from subprocess import run
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from turns import Turns, Way, measure
from workload_tables import MOVE_COMMAND, Record, overhead, tables, transparent_figures, user_figures

from jitckpt import device
from jitckpt.console import say
from jitckpt.events import read_events

WORKLOADS = Path(__file__).resolve().parents[2] / "examples" / "workloads"
JITCKPT = [sys.executable, "-P", "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PLAIN, USER, TRANSPARENT = "without", "user", "transparent"
STEPS_OF_A_TURN = 3
FIRST_FAILURE = 8  # the step: transparent mode has validated one, and the state has stayed on the devices
LIMIT = 1800  # seconds: finds hangs, however slow the machine
SAID = re.compile(r"^(step \d+|rank \d+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Workload:
    """A row of the paper's Table 2. needs: a package. own_lines: it has user-level mode's lines."""

    name: str
    script: str
    ranks: int
    parallelism: str
    framework: str
    needs: str = "torch"
    own_lines: bool = True


ALL = [
    Workload("GPT2-S", "gpt2_s.py", 2, "2D", "PyTorch"),
    Workload("GPT2-S-3D", "gpt2_3d.py", 8, "2D-2P-2T", "Megatron-core", "megatron.core"),
    Workload(
        "BERT-B-FT", "bert_finetune.py", 2, "2D", "transformers' Trainer", "transformers", own_lines=False
    ),
    Workload("T5-3B", "t5_fsdp.py", 4, "FSDP, 2 x 2 shards", "PyTorch, transformers", "transformers"),
    Workload("ViT", "vit.py", 2, "2D", "PyTorch"),
    Workload("PyramidNet", "pyramidnet.py", 2, "2D", "PyTorch"),
]


class WrongEnd(Exception):
    """A job did not do what the one without jitckpt does."""


class Measuring:
    """One workload in a folder."""

    def __init__(
        self, workload: Workload, folder: Path, options: argparse.Namespace, told: Callable[[str], None]
    ) -> None:
        self.workload, self.folder, self.options, self._told = workload, folder, options, told
        self.turns = Turns(options.turns, STEPS_OF_A_TURN)
        self.steps = max(self.turns.steps_in_all, FIRST_FAILURE + 4 * options.failures)
        self.expected: dict[str, str] = {}

    def record(self) -> Record:
        """Measure all; return what was found. Raises WrongEnd."""
        load = os.getloadavg()[0]
        began = time.monotonic()
        seconds = self._turns()
        user = user_figures(self._fail(USER))
        recovery, phases = transparent_figures(self._fail(TRANSPARENT))
        moved = self._move() if self.options.moves else None
        found: Record = {"workload": self.workload.name}
        found |= {"parallelism": self.workload.parallelism, "framework": self.workload.framework}
        found |= {"ranks": self.workload.ranks, "steps": self.steps}
        found["user"] = user | self._cost(seconds, USER)
        found["transparent"] = {"recovery": recovery} | self._cost(seconds, TRANSPARENT) | {"phases": phases}
        found["move"] = moved and moved | {"minibatch": found["transparent"]["minibatch"]}
        found |= {"turns": self.turns.number, "failures": self.options.failures, "equal": True}
        found |= {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "cores": os.cpu_count()}
        found |= {"torch": version("torch"), "date": datetime.now(UTC).date().isoformat()}
        return found | {"seconds": round(time.monotonic() - began)}

    def moves_alone(self) -> Record:
        """Measure Table 6; return what a record has of that. Raises WrongEnd."""
        load = os.getloadavg()[0]
        self._told("without jitckpt")
        self._job(PLAIN, [], self.workload.ranks)
        found: Record = {"workload": self.workload.name, "user": None, "transparent": None}
        move: dict[str, Any] = dict(self._move()) | {"minibatch": None}
        move |= {"load": [round(load, 1), round(os.getloadavg()[0], 1)]}
        return found | {"move": move | {"date": datetime.now(UTC).date().isoformat()}}

    def _cost(self, seconds: dict[str, list[float]], way: str) -> dict[str, Any]:
        if not seconds:
            return {"minibatch": None, "overhead": None}
        return {"minibatch": median(seconds[way]), "overhead": overhead(seconds[PLAIN], seconds[way])}

    def _script(self, mode: str) -> list[str]:
        """Return the script's arguments."""
        protect = ["--protect"] if mode == USER and self.workload.own_lines else []
        return ["--steps", str(self.steps), *protect]

    def _launcher(self, mode: str, *flags: str) -> list[str]:
        number = ["--nproc-per-node", str(self.workload.ranks)]
        if mode == PLAIN:
            return [*TORCHRUN, *number]
        # No spares, which come before a failure; but torch is loaded once, not by each process: eight on
        # two cores would be busy with that alone.
        start = ("--warm-spares", "0", "--warm-start")
        flags = ("--device", "softgpu", "--mode", mode, "--checkpoint-dir", "ckpt", *start, *flags)
        return [*JITCKPT, "run", "--standalone", *number, *flags]

    def _environment(self, mode: str, devices: int) -> dict[str, str]:
        environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "SOFTGPU_DEVICES": str(devices)}
        if mode == PLAIN:
            environment |= device.device_environment("softgpu", devices, device.LIBRARY_DIR, environment)
            libraries = environment["LD_PRELOAD"].split(":")
            environment["LD_PRELOAD"] = ":".join(
                one for one in libraries if not one.endswith("/libjitckpt.so")
            )
        return environment

    def _turns(self) -> dict[str, list[float]]:
        """Return the seconds of a step of each way; from here on it is known how the training ends."""
        if self.turns.number == 0:
            self._told("without jitckpt")
            self._job(PLAIN, [], self.workload.ranks)
            return {}
        ways = (PLAIN, USER, TRANSPARENT)
        ranks = self.workload.ranks
        found = measure(
            {way: Way(self._launcher(way), self._environment(way, ranks), self._script(way)) for way in ways},
            WORKLOADS / self.workload.script,
            ranks,
            self.turns,
            folder=self.folder / "turns",
            told=lambda text: self._told(f"turns: {text}"),
        )
        self.expected = _said((self.folder / "turns" / PLAIN / "out").read_text())
        for way in (USER, TRANSPARENT):
            self._compare(way, (self.folder / "turns" / way / "out").read_text())
        return found

    def _fail(self, mode: str) -> list[Any]:
        """Let ranks fail; return the job's events."""
        self._told(f"failures in {mode} mode")
        what = "backward kind=kill" if mode == USER else "allreduce kind=collective-error"
        faults = [
            f"rank={(1 + number) % self.workload.ranks} step={FIRST_FAILURE + 4 * number} phase={what}"
            for number in range(self.options.failures)
        ]
        return self._job(mode, faults, self.workload.ranks)

    def _move(self) -> dict[str, float]:
        self._told("a device that is broken")
        fault = f"rank=1 step={FIRST_FAILURE} phase=backward kind=device-lost-hard"
        events = self._job(TRANSPARENT, [fault], self.workload.ranks + 1, "--broken-device", "move")
        recovery, _ = transparent_figures(events)
        moved = [one["seconds"] for one in events if one["event"] == "worker_moved"]
        if not moved:
            raise WrongEnd(f"{self.workload.name}: no process was made anew, see `jitckpt doctor`")
        return {"healthy": recovery, "failed": moved[0]}

    def _job(self, mode: str, faults: Sequence[str], devices: int, *flags: str) -> list[Any]:
        folder = Path(tempfile.mkdtemp(prefix=f"{mode}-", dir=self.folder))
        ordered = [word for fault in faults for word in ("--fault", fault)]
        if mode == USER:
            ordered += ["--max-restarts", str(len(faults))]
        command = [*self._launcher(mode, *flags, *ordered), str(WORKLOADS / self.workload.script)]
        ended = run(
            [*command, *self._script(mode)],
            cwd=folder,
            env=self._environment(mode, devices),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if ended.returncode != 0:
            raise WrongEnd(f"{self.workload.name}, {mode} mode: the job failed:\n{ended.stderr[-6000:]}")
        if mode == PLAIN:
            self.expected = _said(ended.stdout)
            return []
        self._compare(mode, ended.stdout)
        return read_events(folder / "ckpt")[0]

    def _compare(self, mode: str, out: str) -> None:
        said = _said(out)
        if different := [what for what, value in self.expected.items() if said.get(what) != value]:
            raise WrongEnd(
                f"{self.workload.name}, {mode} mode: not as without jitckpt: {', '.join(different)}"
            )


def _said(out: str) -> dict[str, str]:
    """Return the loss of each step, and what each rank has in the end; what is printed again counts once."""
    return dict(SAID.findall(out))


def show(records: Sequence[Record], console: Console) -> None:
    for one in tables(records):
        table = Table(*one.headings, title=one.title, title_justify="left")
        for row in one.rows:
            table.add_row(*map(Text, row))  # brackets are brackets
        console.print(table)
    console.print("Seconds, in parentheses the paper's; overhead: median and quartiles of pairs of turns.")
    if any(one["move"] is None for one in records):
        console.print(
            "Table 6 is measured with --moves; one workload alone:",
            MOVE_COMMAND,
            soft_wrap=True,
            highlight=False,
        )


def put(file: Path, records: Sequence[Record]) -> None:
    """Put records into a file, in the order of ALL."""
    lines = file.read_text().splitlines() if file.exists() else []
    known = {one["workload"]: one for one in map(json.loads, lines)}
    for one in records:
        before = known.get(one["workload"])
        if before is None or one["transparent"] is not None:
            known[one["workload"]] = one
        else:  # it is of Table 6 alone
            minibatch = before["transparent"] and before["transparent"]["minibatch"]
            before["move"] = one["move"] | {"minibatch": minibatch}
    ordered = [known[one.name] for one in ALL if one.name in known]
    file.write_text("".join(json.dumps(one) + "\n" for one in ordered))


def installed(workload: Workload) -> bool:
    try:
        return importlib.util.find_spec(workload.needs) is not None
    except ModuleNotFoundError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[one.name for one in ALL], help="some workloads")
    parser.add_argument(
        "--turns", type=int, default=8, help="of 3 steps that count; 0: no overhead (default 8)"
    )
    parser.add_argument("--failures", type=int, default=3, help="of each mode (default 3)")
    parser.add_argument("--moves", action="store_true", help="measure Table 6, too")
    parser.add_argument("--only-moves", action="store_true", help="measure Table 6, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--record", type=Path, help="put the records into this file")
    options = parser.parse_args()
    chosen = [one for one in ALL if not options.only or one.name in options.only]
    for one in chosen:
        if not installed(one):
            say(f"{one.name} is left out: {one.needs} is not installed (pip install --group frameworks).")
    chosen = [one for one in chosen if installed(one)]
    records: list[Record] = []
    wrong = 0
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(chosen))
        for workload in chosen:

            def told(text: str, name: str = workload.name) -> None:
                progress.update(task, description=f"{name}: {text}")

            try:
                with tempfile.TemporaryDirectory() as folder:
                    measuring = Measuring(workload, Path(folder), options, told)
                    records.append(measuring.moves_alone() if options.only_moves else measuring.record())
            except (WrongEnd, ValueError) as error:
                say(f"{workload.name}: {error}")
                wrong += 1
            progress.advance(task)
            if options.record:
                put(options.record, records)
    if options.json:
        print(json.dumps(records))
    elif records:
        show(records, Console())
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
