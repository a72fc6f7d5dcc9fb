"""`jitckpt verify`: prove that a training comes back bit for bit from random failures."""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from jitckpt.cli.exec import add_device_argument, positive_number
from jitckpt.cli.parser import Parser
from jitckpt.cli.progress import shown_progress
from jitckpt.cli.script import script_of
from jitckpt.errors import JitckptError
from jitckpt.faults.injection import FATAL_KINDS
from jitckpt.rehearsal.runs import OUTPUT, Run, Strike, run_job
from jitckpt.rehearsal.trials import (
    FROM_OUTSIDE,
    TrialVerdict,
    choose_trial,
    differing_parts,
    judge,
    steps_of,
)
from jitckpt.saves.final_state import RANDOM
from jitckpt.system.signals import end_in_order
from jitckpt.wire.environment import SELF_CHECK
from jitckpt.worker.self_check.comparison import FULL_SELF_CHECK

LEAST_STEPS = 3
SHOWN_OUTPUT = 4000  # characters


class VerifyError(JitckptError):
    """The training can't be verified; the text is a sentence that says why."""


@dataclass(frozen=True)
class VerifyResult:
    """What was found. chance: parts of the final state that differ between two undisturbed runs.

    self_check: what a restart would not bring back, as found beside the first undisturbed run; not_checked:
    what was left out there, and why.
    """

    steps: int
    step_seconds: float
    chance: tuple[str, ...]
    left_out: tuple[str, ...]
    verdicts: tuple[TrialVerdict, ...]
    self_check: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()

    @property
    def passed(self) -> int:
        return sum(not verdict.reason for verdict in self.verdicts)


ATTEMPTS = 5  # at a trial whose job was over before its failure came, as where a step takes milliseconds


def main(arguments: list[str]) -> int:
    """Make the runs; return 0 if all trials passed, 1 if not. Raises VerifyError if none can be made."""
    parser = Parser(
        prog="jitckpt verify",
        usage="jitckpt verify [options] -- [jitckpt run's options] script.py [the script's arguments]",
        description="Run a short training undisturbed, and again with random failures; compare bit for bit.",
    )
    parser.add_argument("--nproc-per-node", type=positive_number, default=2, metavar="N", help="(default 2)")
    parser.add_argument("--trials", type=positive_number, default=3, help="runs with a failure (default 3)")
    parser.add_argument(
        "--seed", type=int, help="chooses the failures (default: a new one, which is printed)"
    )
    parser.add_argument(
        "--kinds",
        type=_kinds,
        default=(FROM_OUTSIDE, "kill", "exit", "exception"),
        help=f"{FROM_OUTSIDE} (SIGKILL at any time) or kinds of faults: {', '.join(FATAL_KINDS)}; "
        f"with commas (default {FROM_OUTSIDE},kill,exit,exception)",
    )
    parser.add_argument(
        "--hang-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="as for `jitckpt run` (default 30)",
    )
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="SECONDS", help="of one run (default 600)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep saves and output of all runs there")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    add_device_argument(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script with its arguments, after --")
    args = parser.parse_args(arguments)
    args.command = script_of(args.command)
    if not args.command:
        parser.error("there is no script to run: jitckpt verify [options] -- train.py its arguments")
    if args.keep is not None and args.keep.exists():
        parser.error(f"{args.keep} is there already; name a folder that is not")
    args.seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    end_in_order()
    if args.keep is not None:
        return _verify(args, args.keep.absolute())
    with tempfile.TemporaryDirectory(prefix="jitckpt-verify-") as temporary:
        return _verify(args, Path(temporary))


def _verify(args: argparse.Namespace, folder: Path) -> int:
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 180)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with shown_progress(*columns) as progress:
        result = _try(args, folder, console, progress)
    if args.json:
        document = asdict(result) | {"seed": args.seed, "command": args.command, "passed": result.passed}
        print(json.dumps(document, indent=1))
    else:
        _tell(console, result)
    return 0 if result.passed == args.trials else 1


def _try(args: argparse.Namespace, folder: Path, console: Console, progress: Progress) -> VerifyResult:
    task = progress.add_task("undisturbed", total=args.trials + 2)
    undisturbed, again = (_undisturbed(args, folder / name, progress, task) for name in ("one", "two"))
    chance = _chance(undisturbed, again)
    steps = steps_of(undisturbed)
    each = f"{steps} steps of {undisturbed.step_seconds:.3f} s"
    console.print(f"undisturbed: {each}; failures chosen by --seed {args.seed}", highlight=False)
    verdicts = []
    for number in range(1, args.trials + 1):
        trial = choose_trial(
            args.seed,
            number,
            ranks=args.nproc_per_node,
            steps=steps,
            step_seconds=undisturbed.step_seconds,
            kinds=args.kinds,
        )
        progress.update(task, description=f"trial {number}")
        where = folder / f"trial-{number}"
        try:
            run = _run(args, where, trial.faults, trial.strikes)
            for attempt in range(1, ATTEMPTS):
                if not trial.missed(run):
                    break
                where = folder / f"trial-{number}-{attempt}"
                run = _run(args, where, trial.faults, trial.strikes)
            verdicts.append(judge(trial, run, undisturbed, chance))
        except TimeoutError as error:
            verdicts.append(TrialVerdict(str(trial), None, None, None, None, 0, str(error)))
        progress.advance(task)
        reason = verdicts[-1].reason
        console.print(f"trial {number}: {trial}: {reason or 'equal bit for bit'}", highlight=False)
        if reason:
            console.print((where / OUTPUT).read_text()[-SHOWN_OUTPUT:], markup=False, highlight=False)
    left_out = {name for state in undisturbed.final.values() for name in state.left_out}
    checks = [event for event in undisturbed.events if event["event"] == "self_check"]
    return VerifyResult(
        steps,
        undisturbed.step_seconds,
        chance,
        tuple(sorted(left_out)),
        tuple(verdicts),
        tuple(dict.fromkeys(text for check in checks for text in check["differences"])),
        tuple(dict.fromkeys(text for check in checks for text in check["skipped"])),
    )


def _run(
    args: argparse.Namespace, folder: Path, faults: Sequence[str] = (), strikes: Sequence[Strike] = ()
) -> Run:
    run = run_job(
        args.command,
        folder,
        ranks=args.nproc_per_node,
        device=args.device,
        faults=faults,
        strikes=strikes,
        hang_timeout=args.hang_timeout,
        time_limit=args.time_limit,
        cwd=Path.cwd(),
        variables=SELF_CHECK.to(FULL_SELF_CHECK),
    )
    # Temporary files are the script's own affair.
    return replace(run, left_behind=tuple(t for t in run.left_behind if not t.startswith(str(folder))))


def _undisturbed(args: argparse.Namespace, folder: Path, progress: Progress, task: TaskID) -> Run:
    try:
        run = _run(args, folder)
    except TimeoutError as error:
        raise VerifyError(f"{error} Give it fewer steps, or verify more time (--time-limit).") from error
    progress.advance(task)
    said = (folder / OUTPUT).read_text()[-SHOWN_OUTPUT:]
    if run.status != 0:
        raise VerifyError(
            f"The undisturbed run ended with status {run.status}. The end of what it said:\n{said}"
        )
    if sorted(run.final) != list(range(args.nproc_per_node)):
        raise VerifyError(
            "The undisturbed run was not under jitckpt's protection on every rank: does the script call "
            f"jitckpt.init, with its model on a CUDA device? The end of what it said:\n{said}"
        )
    if steps_of(run) < LEAST_STEPS:
        raise VerifyError(
            f"The training makes {steps_of(run)} optimizer steps; to be hit at random moments it must make "
            f"{LEAST_STEPS} or more."
        )
    return run


def _chance(one: Run, other: Run) -> tuple[str, ...]:
    """Return the random number generators that the script leaves to chance; VerifyError if more differs."""
    parts = differing_parts(one, other)
    training = sorted(part for part in parts if not part.startswith(RANDOM))
    if training:
        raise VerifyError(
            f"Two undisturbed runs ended with different {', '.join(training)}: this training does not repeat "
            "itself, so no run after a failure can be compared with it. Seed all random number generators, "
            "call torch.use_deterministic_algorithms(True), and make the order of the data repeatable."
        )
    return tuple(sorted(parts))


def _tell(console: Console, result: VerifyResult) -> None:
    table = Table(pad_edge=False)
    for heading in ("", "failure", "went on from", "redone", "recovery", "verdict"):
        table.add_column(heading, justify="left" if heading in ("failure", "verdict") else "right")
    for number, verdict in enumerate(result.verdicts, start=1):
        recovery = "-" if verdict.recovery_seconds is None else f"{verdict.recovery_seconds:.1f} s"
        step, redone = ("-" if value is None else str(value) for value in (verdict.step, verdict.redone))
        said = verdict.reason or "equal bit for bit"
        table.add_row(str(number), verdict.failure, step, redone, recovery, said)
    console.print(table)
    if result.chance:
        console.print(
            f"Not compared, because the script does not seed them: {', '.join(result.chance)}.",
            highlight=False,
        )
    if result.left_out:
        console.print(f"Not compared, of unknown kinds: {', '.join(result.left_out)}.", highlight=False)
    for text in result.self_check:
        console.print(f"A restart would not bring this back: {text}.", markup=False, highlight=False)
    for text in result.not_checked:
        console.print(f"Self-check: {text}.", markup=False, highlight=False)
    console.print("Ended as if nothing had been, bit for bit, and left nothing behind:")
    console.print(f"{result.passed} of {len(result.verdicts)}", highlight=False)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in (FROM_OUTSIDE, *FATAL_KINDS)]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)} is none of {FROM_OUTSIDE}, {', '.join(FATAL_KINDS)}"
        )
    return kinds
