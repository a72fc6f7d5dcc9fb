"""Makes ranks fail at random moments, a trial each, and compares the results with undisturbed runs."""

import argparse
import json
import random
import shlex
import sys
import tempfile
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jitckpt.faults import FATAL_KINDS
from jitckpt.rehearsal import OUTPUT, Run, end_in_order_on_sigterm, run_job
from jitckpt.trials import FROM_OUTSIDE, Trial, Verdict, choose_trial, is_silent, judge, steps_of

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = tuple(ROOT / "examples" / f"train_{name}.py" for name in ("gpt", "loop_without_sync", "convnet"))
SILENT_TIMEOUT = 15.0  # seconds until a stopped rank is missed
SAVE_DEADLINE = "30"  # seconds; a stopped rank does not save, and is waited for if no other could
# The examples leave these generators to chance, and use none of them.
UNSEEDED = ("random numbers, Python's", "random numbers, numpy's")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fault-campaign",
        usage="%(prog)s [example] [options] [-- the example's arguments]",
        description=__doc__,
    )
    parser.add_argument("example", type=Path, nargs="?", help="default: those of examples/, by turns")
    parser.add_argument("--trials", type=int, default=20, help="how many runs (default 20)")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="begin with trial N (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the failures (default 0)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run (default 40)")
    parser.add_argument(
        "--ranks", type=counts, default=(2, 4), help="numbers of ranks, by turns (default 2,4)"
    )
    parser.add_argument(
        "--kinds",
        type=lambda text: tuple(text.split(",")),
        default=(FROM_OUTSIDE, "kill", "exit", "exception", "stop"),
        help=f"{FROM_OUTSIDE} (SIGKILL at any time) or kinds of faults: {', '.join(FATAL_KINDS)}",
    )
    parser.add_argument(
        "--second",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="of the trials in which a rank fails again, in a save, restart or restore (default 0.3)",
    )
    parser.add_argument(
        "--two-at-once",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the trials of 4 ranks and more in which two fail at once (default 0)",
    )
    parser.add_argument("--mode", choices=("user",), default="user", help="of protection (default user)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    own = list(takewhile(lambda word: word != "--", sys.argv[1:]))
    args = parser.parse_args(own)
    args.arguments = sys.argv[len(own) + 2 :]
    args.example = (args.example.resolve(),) if args.example else EXAMPLES
    for path in args.example:
        if not path.is_file():
            parser.error(f"there is no script {path}")
    if args.trials < 1 or args.first < 1 or args.steps < 8:
        parser.error("--trials and --first must be at least 1 and --steps at least 8")
    unknown = set(args.kinds) - {FROM_OUTSIDE, *FATAL_KINDS}
    if unknown:
        parser.error(
            f"--kinds: {', '.join(sorted(unknown))} is none of {FROM_OUTSIDE}, {', '.join(FATAL_KINDS)}"
        )
    return args


def counts(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError("it takes 2 ranks for one to survive")
    return numbers


class Campaign:
    """The undisturbed runs, each made once, and the trials."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.undisturbed: dict[tuple[Path, int], Run] = {}

    def place(self, number: int) -> tuple[Path, int]:
        """Return example and number of ranks of a trial."""
        examples, ranks = self.args.example, self.args.ranks
        return examples[number % len(examples)], ranks[number // len(examples) % len(ranks)]

    def chance(self, number: int) -> float:
        return random.Random(f"{self.args.seed} {number} at once").random()

    def command(self, example: Path) -> list[str]:
        return [
            "--save-deadline",
            SAVE_DEADLINE,
            str(example),
            "--steps",
            str(self.args.steps),
            *self.args.arguments,
        ]

    def reference(self, example: Path, ranks: int) -> Run:
        if (example, ranks) not in self.undisturbed:
            folder = self.folder / f"{example.stem}-{ranks}"
            run = run_job(self.command(example), folder, ranks=ranks)
            if run.status != 0 or run.left_behind or steps_of(run) != self.args.steps:
                said = (folder / OUTPUT).read_text()[-4000:]
                raise SystemExit(
                    f"{said}\nThe undisturbed run of {example.name} failed: status {run.status}, "
                    f"{steps_of(run)} steps, left behind {run.left_behind}."
                )
            self.undisturbed[example, ranks] = run
        return self.undisturbed[example, ranks]

    def trial(self, number: int) -> tuple[Trial, Verdict]:
        args = self.args
        example, ranks = self.place(number)
        undisturbed = self.reference(example, ranks)
        trial = choose_trial(
            args.seed,
            number,
            ranks=ranks,
            steps=args.steps,
            step_seconds=undisturbed.step_seconds,
            kinds=args.kinds,
            second=number * args.second % 1 < args.second,
            two_at_once=ranks >= 4 and self.chance(number) < args.two_at_once,
        )
        folder = self.folder / str(number)
        timeout = SILENT_TIMEOUT if is_silent(trial.kind) else 60.0
        try:
            run = run_job(
                self.command(example),
                folder,
                ranks=ranks,
                faults=trial.faults,
                strikes=trial.strikes,
                hang_timeout=timeout,
            )
        except TimeoutError as error:
            return trial, Verdict(str(trial), None, None, None, None, 0, str(error))
        return trial, judge(trial, run, undisturbed, UNSEEDED)


def tell(console: Console, campaign: Campaign, verdicts: dict[int, Verdict]) -> None:
    table = Table(title=f"{campaign.args.steps} steps, seed {campaign.args.seed}", title_justify="left")
    left = ("example", "failure", "verdict")
    for heading in ("", "example", "ranks", "failure", "went on from", "redone", "recovery", "verdict"):
        table.add_column(heading, justify="left" if heading in left else "right")
    for number, verdict in verdicts.items():
        example, ranks = campaign.place(number)
        recovery = f"{verdict.recovery_seconds:.1f} s" if verdict.recovery_seconds is not None else "-"
        step, redone = ("-" if value is None else str(value) for value in (verdict.step, verdict.redone))
        place = (str(number), example.stem.removeprefix("train_"), str(ranks), verdict.failure)
        table.add_row(*place, step, redone, recovery, verdict.reason or "equal bit for bit")
    console.print(table)
    passed = sum(not verdict.reason for verdict in verdicts.values())
    console.print("Bit for bit equal to the undisturbed run, with nothing left behind:")
    console.print(f"{passed} of {len(verdicts)}", highlight=False)


def main() -> int:
    args = parse_arguments()
    end_in_order_on_sigterm()
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 180)
    numbers = range(args.first, args.first + args.trials)
    verdicts: dict[int, Verdict] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("trials"), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(prefix="jitckpt-campaign-") as temporary,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        campaign = Campaign(args, Path(temporary))
        for number in progress.track(numbers):
            trial, verdicts[number] = campaign.trial(number)
            said = verdicts[number].reason or "equal bit for bit"
            console.print(f"trial {number}: {trial}: {said}", highlight=False, soft_wrap=True)
            if verdicts[number].reason:
                output = (campaign.folder / str(number) / OUTPUT).read_text()[-4000:]
                console.print(output, markup=False, highlight=False, soft_wrap=True)
    passed = all(not verdict.reason for verdict in verdicts.values())
    if args.json:
        command = shlex.join(["scripts/fault-campaign", *sys.argv[1:]])
        results = {number: asdict(verdict) for number, verdict in verdicts.items()}
        print(json.dumps({"command": command, "passed": passed, "results": results}))
    else:
        tell(console, campaign, verdicts)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
