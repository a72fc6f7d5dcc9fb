"""Kills one rank at random moments, one a run, and compares each run with an undisturbed one, bit for bit."""

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rehearsal import ROOT, Kill, Run, end_in_order_on_sigterm, run_example
from rich.console import Console
from rich.table import Table

from jitckpt.faults import PHASES


@dataclass(frozen=True)
class Result:
    """One run with a failure. moment: what was done to it. reason: why it did not pass, empty if it did.

    step: the one that the job went on from. redone: minibatches, at most. recovery_seconds: from detection
    to the first new step of the slowest rank.
    """

    moment: str
    step: int | None
    redone: int | None
    recovery_seconds: float | None
    seconds: float | None
    reason: str


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/campaign", description=__doc__)
    parser.add_argument("example", type=Path, nargs="?", default=ROOT / "examples" / "train_gpt.py")
    parser.add_argument("arguments", nargs="*", help="for the example, after --")
    parser.add_argument("--kills", type=int, default=20, help="how many runs (default 20)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (default 0)")
    parser.add_argument(
        "--method",
        choices=("fault", "signal", "both"),
        default="both",
        help="a fault of some step and phase, a signal from outside at some time, or by turns (default)",
    )
    parser.add_argument(
        "--kind", choices=("kill", "stop", "exception", "exit"), default="kill", help="of the faults"
    )
    parser.add_argument(
        "--hang-timeout", type=float, default=60, help="seconds until a silent rank is missed (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    args = parser.parse_args()
    args.example = args.example.resolve()
    if not args.example.is_file():
        parser.error(f"there is no script {args.example}")
    if args.kills < 1 or args.steps < 8:
        parser.error("--kills must be at least 1 and --steps at least 8")
    return args


def choose_moments(args: argparse.Namespace, step_seconds: float) -> Iterator[str | Kill]:
    """Where each run is hit: the text of a fault, or a signal from outside at any time within a step."""
    chance = random.Random(args.seed)
    phases = [phase for phase in PHASES if phase != "allreduce" or args.kind in ("kill", "stop")]
    for number in range(args.kills):
        rank = chance.randrange(2)
        fault = f"step={chance.randint(1, args.steps - 1)} phase={chance.choice(phases)}"
        # Not among the last: a signal to a rank that has ended hits nobody.
        step, delay = chance.randint(1, args.steps * 3 // 4), chance.uniform(0, step_seconds)
        if args.method == "signal" or (args.method == "both" and number % 2):
            yield Kill(rank, step, round(delay, 4))
        else:
            yield f"rank={rank} {fault} kind={args.kind}"


def describe(moment: str | Kill) -> str:
    if isinstance(moment, str):
        return moment
    return f"rank={moment.rank} SIGKILL {1000 * moment.delay:.1f} ms after step {moment.step}"


def judge(moment: str | Kill, run: Run, undisturbed: Run) -> Result:
    reasons = []
    if run.status != 0:
        reasons.append(f"ended with status {run.status}")
    elif run.digests != undisturbed.digests:
        reasons.append("parameters or buffers differ")
    if run.restarts != 1 or len(run.recoveries) != 1:
        reasons.append(f"{run.restarts} restarts, {len(run.recoveries)} failures detected")
    recovery = run.recoveries[0] if run.recoveries else None
    redone = recovery.redone if recovery else None
    if redone not in (0, 1):
        reasons.append(f"{redone} minibatches redone")
    reasons += [f"left behind {thing}" for thing in run.left_behind]
    step, recovery_seconds = (recovery.step, recovery.first_step_seconds) if recovery else (None, None)
    return Result(describe(moment), step, redone, recovery_seconds, run.seconds, "; ".join(reasons))


def tell(console: Console, args: argparse.Namespace, results: list[Result]) -> None:
    table = Table(title=f"{args.example.name}, {args.steps} steps, seed {args.seed}", title_justify="left")
    for heading in ("", "failure", "went on from", "redone", "recovery", "all", "verdict"):
        table.add_column(heading, justify="left" if heading in ("failure", "verdict") else "right")
    for number, result in enumerate(results, start=1):
        recovery = f"{result.recovery_seconds:.1f} s" if result.recovery_seconds is not None else "-"
        seconds = f"{result.seconds:.1f} s" if result.seconds is not None else "-"
        amounts = (str(result.step), str(result.redone), recovery, seconds)
        table.add_row(str(number), result.moment, *amounts, result.reason or "equal bit for bit")
    console.print(table)
    passed = sum(not result.reason for result in results)
    console.print(f"{passed} of {len(results)} ended bit for bit equal, with nothing left behind.")


def main() -> int:
    args = parse_arguments()
    end_in_order_on_sigterm()
    console = Console(stderr=args.json)
    arguments = ["--steps", str(args.steps), *args.arguments]
    with tempfile.TemporaryDirectory(prefix="jitckpt-campaign-") as temporary:
        folder = Path(temporary)
        undisturbed = run_example(args.example, folder / "undisturbed", arguments)
        if undisturbed.status != 0 or undisturbed.left_behind or len(undisturbed.digests) != 2:
            console.print((folder / "undisturbed" / "output.txt").read_text(), markup=False, highlight=False)
            console.print(
                f"The undisturbed run failed: status {undisturbed.status}, {undisturbed.left_behind}."
            )
            return 1
        training_seconds = undisturbed.steps[-1][0] - undisturbed.steps[0][0]
        console.print(f"undisturbed: {args.steps} steps in {training_seconds:.1f} s", highlight=False)
        results = []
        for number, moment in enumerate(choose_moments(args, training_seconds / args.steps), start=1):
            fault, kill = (moment, None) if isinstance(moment, str) else (None, moment)
            run_folder = folder / str(number)
            try:
                run = run_example(
                    args.example,
                    run_folder,
                    arguments,
                    fault=fault,
                    kill=kill,
                    hang_timeout=args.hang_timeout,
                )
                results.append(judge(moment, run, undisturbed))
            except TimeoutError as error:
                results.append(Result(describe(moment), None, None, None, None, str(error)))
            said = results[-1].reason or "equal bit for bit"
            console.print(
                f"{number} of {args.kills}: {results[-1].moment}: {said}", highlight=False, soft_wrap=True
            )
            if results[-1].reason:
                console.print((run_folder / "output.txt").read_text()[-4000:], markup=False, soft_wrap=True)
    passed = all(not result.reason for result in results)
    if args.json:
        command = shlex.join(["scripts/campaign", *sys.argv[1:]])
        print(json.dumps({"command": command, "passed": passed, "results": [asdict(r) for r in results]}))
    else:
        tell(console, args, results)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
