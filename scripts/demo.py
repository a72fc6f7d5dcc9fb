"""Trains a small GPT twice, undisturbed and with rank 1 killed at a random moment, and compares them."""

import argparse
import json
import random
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fault_campaign import ROOT, UNSEEDED
from loss_picture import Curve, draw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from safetensors.numpy import load_file

from jitckpt.faults.injection import PHASES
from jitckpt.rehearsal.runs import CHECKPOINTS, JITCKPT, OUTPUT, Run, run_job
from jitckpt.rehearsal.trials import differences
from jitckpt.system.signals import end_in_order

EXAMPLE = ROOT / "examples" / "train_gpt.py"


@dataclass(frozen=True)
class Outcome:
    """What the demo found. Seconds are wall time; redone minibatches include the interrupted one."""

    seed: int
    fault: str
    steps: int
    tensors: int
    tensors_equal: int
    digests_equal: bool
    losses_equal: bool
    restored_step: int | None
    minibatches_redone: int | None
    seconds_undisturbed: float
    seconds_killed: float
    left_behind: tuple[str, ...]

    @property
    def bit_for_bit(self) -> bool:
        return self.digests_equal and self.losses_equal and 0 < self.tensors == self.tensors_equal

    @property
    def passed(self) -> bool:
        recovered = self.restored_step is not None and self.minibatches_redone in (0, 1)
        return self.bit_for_bit and recovered and not self.left_behind


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--seed", type=int, help="chooses the moment of the failure (default: a new one)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default 60)")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", help="(default demo-output)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no tables")
    args = parser.parse_args()
    if args.steps < 8:
        parser.error(f"--steps must be at least 8, not {args.steps}")
    return args


def read_losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "losses.jsonl").read_text().splitlines()]


def compare(folders: tuple[Path, Path], runs: tuple[Run, Run], seed: int, fault: str, steps: int) -> Outcome:
    undisturbed, killed = runs
    expected, found = (load_file(folder / "parameters.safetensors") for folder in folders)
    recovery = killed.recoveries[0] if len(killed.recoveries) == 1 else None
    equal = [name for name in expected if name in found and expected[name].tobytes() == found[name].tobytes()]
    return Outcome(
        seed=seed,
        fault=fault,
        steps=steps,
        tensors=len(expected.keys() | found.keys()),
        tensors_equal=len(equal),
        digests_equal=differences(killed, undisturbed, UNSEEDED) == [],
        losses_equal=read_losses(folders[0]) == read_losses(folders[1]),
        restored_step=recovery.step if recovery and recovery.restarted else None,
        minibatches_redone=recovery.redone if recovery else None,
        seconds_undisturbed=undisturbed.seconds,
        seconds_killed=killed.seconds,
        left_behind=undisturbed.left_behind + killed.left_behind,
    )


def tell(console: Console, outcome: Outcome, picture: Path) -> None:
    equal = "yes" if outcome.digests_equal and outcome.tensors == outcome.tensors_equal else "NO"
    seconds = f"{outcome.seconds_undisturbed:.1f} s and {outcome.seconds_killed:.1f} s"
    tensors = f"{outcome.tensors_equal} of {outcome.tensors} tensors"
    lines = {
        "All parameters equal, bit for bit": f"{equal} ({tensors})",
        "The losses of all steps, too": "yes" if outcome.losses_equal else "NO",
        "Went on from step": str(outcome.restored_step),
        "Minibatches redone": str(outcome.minibatches_redone),
        "Time, undisturbed and killed": seconds,
        "Left behind": ", ".join(outcome.left_behind) or "nothing",
        "Both loss curves": str(picture),
    }
    for question, found in lines.items():
        console.print(f"  {question + ':':<36}{found}", highlight=False, soft_wrap=True)


def show_step(progress: Progress, task: TaskID, step: int, _steps: int) -> None:
    progress.update(task, completed=step)


def main() -> int:
    args = parse_arguments()
    end_in_order()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10_000)
    chance = random.Random(seed)
    failed_step = chance.randint(3, args.steps - 2)
    fault = f"rank=1 step={failed_step} phase={chance.choice(PHASES)} kind=kill"
    console = Console(stderr=args.json)
    console.print("Two ranks train a small GPT on softgpu, once undisturbed and once with this failure:")
    console.print(f"  {fault}    (again with --seed {seed})", highlight=False)

    output = args.output.resolve()
    folders = (output / "undisturbed", output / "killed")
    runs = []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    with Progress(TextColumn("  {task.description:<12}"), *columns, console=console) as progress:
        tasks = [progress.add_task(folder.name, total=args.steps, start=False) for folder in folders]
        for task, folder in zip(tasks, folders, strict=True):
            if folder.exists():
                shutil.rmtree(folder)
            progress.start_task(task)
            arguments = ["--steps", str(args.steps), "--losses", str(folder / "losses.jsonl")]
            run = run_job(
                [str(EXAMPLE), *arguments, "--parameters", str(folder / "parameters.safetensors")],
                folder,
                faults=[fault] if folder.name == "killed" else [],
                on_step=partial(show_step, progress, task),
            )
            progress.stop_task(task)
            if run.status != 0:
                progress.stop()
                console.print(f"The {folder.name} run ended with status {run.status}:")
                console.print((folder / OUTPUT).read_text()[-4000:], markup=False, highlight=False)
                return 1
            runs.append(run)

    outcome = compare(folders, (runs[0], runs[1]), seed, fault, args.steps)
    picture = output / "loss.png"
    curves = [Curve(read_losses(folder), run.steps) for folder, run in zip(folders, runs, strict=True)]
    if outcome.restored_step is not None:
        failed_step = outcome.restored_step + 1  # the host may have been some steps ahead of the device
    draw(picture, *curves, failed_step=failed_step, fault=fault)
    result = asdict(outcome) | {"bit_for_bit": outcome.bit_for_bit, "passed": outcome.passed}
    (output / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    if args.json:
        print(json.dumps(result))
    else:
        subprocess.run([*JITCKPT, "timeline", str(folders[1] / CHECKPOINTS)], check=True)
        tell(console, outcome, picture)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
