"""Makes ranks fail at random moments, a trial each, and compares the results with undisturbed runs."""

import argparse
import json
import os
import random
import resource
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from campaign import trials_at_etcd, trials_in_memory, trials_of_moves, trials_on_hosts
from campaign.runs_on_hosts import HOSTS, run_on_hosts
from campaign_hostile import command as campaign_hostile
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from jitckpt.cli.progress import shown_progress
from jitckpt.decisions import memory_wanted
from jitckpt.decisions.check import InvalidInput
from jitckpt.doctor import moved_process
from jitckpt.events import FILE_NAME
from jitckpt.faults.injection import FATAL_KINDS, LASTING_KINDS, TRANSPARENT_KINDS
from jitckpt.rehearsal import trials_in_place
from jitckpt.rehearsal.runs import CHECKPOINTS, OUTPUT, Run, kill_running, run_job
from jitckpt.rehearsal.trials import (
    FROM_OUTSIDE,
    STOPPING_KINDS,
    TRIAL_KINDS,
    UNWRITABLE,
    Trial,
    TrialVerdict,
    choose_trial,
    cut_off,
    is_silent,
    judge,
    judge_resumed,
    steps_of,
)
from jitckpt.rehearsal.trials_in_place import final_as_printed
from jitckpt.saves import folders
from jitckpt.system.signals import end_in_order

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = tuple(ROOT / "examples" / f"train_{name}.py" for name in ("gpt", "loop_without_sync", "convnet"))
REPLICATED = ("hybrid_shard", "tensor_and_data", "pipeline_and_data")
KEPT_IN_MEMORY = tuple(
    ROOT / "scripts" / "campaign_trainings" / f"{name}.py"
    for name in ("full_shard", "zero_stage_1", *REPLICATED)
)
FORMS = ("gpt", "convnet", "fsdp1", "fsdp2", "tensor", "pipeline")
# They know nothing of jitckpt, and print what they end with.
PLAIN = (
    ROOT / "examples" / "plain_ddp.py",
    *(ROOT / "scripts" / "campaign_trainings" / f"{name}.py" for name in FORMS),
)
MOVED = tuple(
    ROOT / "scripts" / "campaign_trainings" / f"{name}.py"
    for name in ("loaders", "convnet", "fsdp2", "tensor", "pipeline", "gpt", "trainer", "nanogpt")
)
# What trainings need that are others' programs, and how it comes here.
NEEDED: dict[str, tuple[Callable[[], bool], str]] = {
    "trainer": (
        lambda: all(map(find_spec, ("transformers", "accelerate"))),
        "transformers and accelerate are not installed (scripts/test --frameworks makes an environment with "
        "them: build/frameworks)",
    ),
    "nanogpt": (
        lambda: Path(os.environ.get("NANOGPT", "/nowhere"), "train.py").exists(),
        "NANOGPT names no checkout of https://github.com/karpathy/nanoGPT",
    ),
}
USER_KINDS = (FROM_OUTSIDE, "kill", "exit", "exception", "stop")
START = Path(__file__).parent / "campaign_start"  # what every Python process of a trial does first
SILENT_TIMEOUT = 15.0  # seconds until a stopped rank is missed
STALL_TIMEOUT = "30"  # seconds until a live one is
SILENT_IN_PLACE = 5.0  # the same in transparent mode, where a false alarm costs little
SAVED_EVERY = 5  # steps, where files are what is left
HOST_TIMEOUT = "4"  # seconds, less than users have, so that slow hosts are taken for lost ones if ever
TIME_LIMIT_ON_HOSTS = 400.0  # hosts wait for others for 600 s
TIME_LIMIT = 1800.0  # seconds of a job, on a machine under load
MOVE_WAIT = 120.0  # seconds, for a host that stands by and has not come yet
SAVE_DEADLINE = "30"  # seconds; a stopped rank does not save, and is waited for if no other could
ATTEMPTS = 5  # at a trial whose job was over before its failure came, as on a machine under load
# Root writes where it may not, unless it gives that up.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ("env",)
# The examples leave these generators to chance, and use none of them.
UNSEEDED = ("random numbers, Python's", "random numbers, numpy's")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fault-campaign",
        usage="%(prog)s [example] [options] [-- the example's arguments]",
        description=__doc__,
    )
    add_runs(parser)
    add_failures(parser)
    add_modes(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    own = list(takewhile(lambda word: word != "--", sys.argv[1:]))
    args = parser.parse_args(own)
    args.arguments = sys.argv[len(own) + 2 :]
    args.example = (args.example.resolve(),) if args.example else examples_of(args.mode)
    args.ranks = numbers_of_ranks(args)
    own_kinds, known = kinds_of(args)
    args.kinds = args.kinds or own_kinds
    check(parser, args, known)
    return args


def add_runs(parser: argparse.ArgumentParser) -> None:
    """What runs, how often, and what of it is kept."""
    parser.add_argument("example", type=Path, nargs="?", help="default: those of examples/, by turns")
    parser.add_argument("--trials", type=int, default=20, help="how many runs (default 20)")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="begin with trial N (default 1)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="trials at a time (default 1)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin no trial later than that (default: begin all)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep saves, events and output of all runs there"
    )


def add_failures(parser: argparse.ArgumentParser) -> None:
    """What befalls the runs."""
    parser.add_argument("--seed", type=int, default=0, help="chooses the failures (default 0)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run (default 40)")
    parser.add_argument(
        "--ranks",
        type=counts,
        help="numbers of ranks, by turns (default 2,4; of jobs in memory 4,8; on hosts one each)",
    )
    parser.add_argument(
        "--kinds",
        type=lambda text: tuple(text.split(",")),
        help=f"{', '.join(TRIAL_KINDS)} (docs/reference/faults.md) or kinds of faults: "
        f"{', '.join(FATAL_KINDS)}; one that is named twice comes twice as often "
        f"(default {','.join(USER_KINDS)}); in transparent mode, "
        f"and by default all: {', '.join(TRANSPARENT_KINDS)}; on hosts, and by default all: "
        f"{', '.join(trials_on_hosts.HOST_KINDS)}; where they meet at etcd: "
        f"{', '.join(trials_at_etcd.KINDS)}; of jobs in memory, and by default all: "
        f"{', '.join(trials_in_memory.MEMORY_KINDS)}; of moves, and by default all: "
        f"{', '.join(trials_of_moves.MOVE_KINDS)}",
    )
    parser.add_argument(
        "--second",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="of the trials in which a rank fails again, while the job recovers (default 0.3)",
    )
    parser.add_argument(
        "--two-at-once",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the trials of 4 ranks and more, in transparent mode of 2, in which two fail at once "
        "(default 0)",
    )


def add_modes(parser: argparse.ArgumentParser) -> None:
    """How the runs are protected."""
    parser.add_argument(
        "--mode",
        choices=("user", "transparent", "hosts", "memory", "moves"),
        default="user",
        help="of protection; hosts: user-level mode on three hosts, network namespaces; memory: on "
        "two to five, of jobs that the memory tier protects, most without replicas; moves: transparent mode "
        "on two and one or two that stand by, to which ranks move by CRIU; `--mode hostile` has "
        "options of its own: --mode hostile --help (default user)",
    )
    parser.add_argument(
        "--state-on-device",
        action=argparse.BooleanOptionalAction,
        help="in transparent mode: as for `jitckpt run`",
    )
    parser.add_argument(
        "--coordination",
        choices=("etcd",),
        help="in mode hosts: they meet at etcd, of which each host has a member that dies with it "
        "(default: at the store of one of them)",
    )
    parser.add_argument(
        "--memory-tier",
        type=tiers,
        default=(trials_in_memory.DEFAULT_TIER,),
        metavar="TIER[,TIER ...]",
        help="in mode memory: as for `jitckpt run`; of several each trial draws one (default peer)",
    )


def examples_of(mode: str) -> tuple[Path, ...]:
    """Return the trainings that are run where none is named."""
    usual = {"memory": KEPT_IN_MEMORY, "transparent": PLAIN, "moves": MOVED}.get(mode, EXAMPLES)
    missing = {name: why for name, (is_there, why) in NEEDED.items() if not is_there()}
    for path in usual:
        if path.stem in missing:
            print(f"{path.stem} is left out: {missing[path.stem]}.", file=sys.stderr)
    return tuple(path for path in usual if path.stem not in missing)


def kinds_of(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of trials by default in a mode, and all that it knows."""
    match args.mode:
        case "transparent":
            return TRANSPARENT_KINDS, (*TRANSPARENT_KINDS, *LASTING_KINDS)
        case "hosts" if args.coordination is not None:
            return trials_at_etcd.KINDS, trials_at_etcd.KINDS
        case "hosts":
            return trials_on_hosts.HOST_KINDS, trials_on_hosts.HOST_KINDS
        case "memory":
            return trials_in_memory.MEMORY_KINDS, trials_in_memory.MEMORY_KINDS
        case "moves":
            return trials_of_moves.MOVE_KINDS, trials_of_moves.MOVE_KINDS
    return USER_KINDS, (*TRIAL_KINDS, *FATAL_KINDS)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, known: tuple[str, ...]) -> None:
    """Refuse what does not go together. known: the mode's kinds of trials."""
    for path in args.example:
        if not path.is_file():
            parser.error(f"there is no script {path}")
    if args.trials < 1 or args.first < 1 or args.parallel < 1 or args.steps < 8:
        parser.error("--trials, --first and --parallel must be at least 1 and --steps at least 8")
    if args.state_on_device is not None and args.mode != "transparent":
        parser.error("--state-on-device: only in --mode transparent")
    if args.coordination is not None and args.mode != "hosts":
        parser.error("--coordination: only in --mode hosts")
    if unknown := set(args.kinds) - set(known):
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if args.keep is not None and args.keep.exists():
        parser.error(f"{args.keep} is there already; name a folder that is not")


def numbers_of_ranks(args: argparse.Namespace) -> tuple[int, ...]:
    """Return those that are wanted, or the usual ones of a mode."""
    if args.mode == "hosts":
        return (HOSTS,) if args.coordination is None else trials_at_etcd.RANKS
    if args.mode == "moves":
        return (sum(trials_of_moves.RANKS),)
    found: tuple[int, ...] = args.ranks or ((4, 8) if args.mode == "memory" else (2, 4))
    if args.mode == "memory" and any(count % 2 or count < 4 for count in found):
        raise SystemExit("fault-campaign: --ranks: in --mode memory even numbers from 4 on")
    return found


def tiers(text: str) -> tuple[str, ...]:
    named = tuple(text.split(","))
    for one in named:
        try:
            memory_wanted.tier(one)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return named


def counts(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError("it takes 2 ranks for one to survive")
    return numbers


class Campaign:
    """The undisturbed runs, each made once, and the trials; of these several threads may make some each."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.undisturbed: dict[tuple[Path, int, tuple[str, ...]], Run] = {}
        self.making_undisturbed = threading.Lock()
        self.last_begin = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        self.over = threading.Event()

    def place(self, number: int) -> tuple[Path, int]:
        """Return example and number of ranks of a trial."""
        examples, ranks = self.args.example, self.args.ranks
        return examples[number % len(examples)], ranks[number // len(examples) % len(ranks)]

    def spread(self, number: int) -> str:
        """Return in words how many ranks a trial has, and where."""
        return str(self.place(number)[1])

    def chance(self, number: int, what: str) -> float:
        return random.Random(f"{self.args.seed} {number} {what}").random()

    def command(self, example: Path, options: Sequence[str] = (), privileged: bool = True) -> list[str]:
        program = [] if privileged else ["--no-python", *WITHOUT_PRIVILEGES, sys.executable, "-u"]
        training = [str(example), "--steps", str(self.args.steps), *self.args.arguments]
        return ["--warm-start", "--save-deadline", SAVE_DEADLINE, *options, *program, *training]

    def reference(self, example: Path, ranks: int, arguments: Sequence[str] = ()) -> Run:
        """arguments: of the example, beside those of all trials."""
        with self.making_undisturbed:
            return self.made_reference(example, ranks, tuple(arguments))

    def made_reference(self, example: Path, ranks: int, arguments: tuple[str, ...]) -> Run:
        key = example, ranks, arguments
        if key not in self.undisturbed:
            folder = self.folder / "-".join((example.stem, str(ranks), *arguments))
            # No failure follows, so no spares are needed.
            command = [*self.command(example, ["--max-restarts", "0"]), *arguments]
            run = self.ended(run_job(command, folder, ranks=ranks, time_limit=TIME_LIMIT), folder)
            if run.status != 0 or run.left_behind or steps_of(run) != self.args.steps:
                said = (folder / OUTPUT).read_text()[-4000:]
                raise SystemExit(
                    f"{said}\nThe undisturbed run of {example.name} failed: status {run.status}, "
                    f"{steps_of(run)} steps, left behind {run.left_behind}."
                )
            self.undisturbed[key] = run
        return self.undisturbed[key]

    def ended(self, run: Run, folder: Path) -> Run:
        """Return the run with what its ranks ended with."""
        return run

    def choose(self, number: int, attempt: int) -> tuple[Trial, Run]:
        """Return a trial, and the undisturbed run that it is compared with.

        attempt: at having its failures come in time.
        """
        args = self.args
        example, ranks = self.place(number)
        undisturbed = self.reference(example, ranks)
        trial = choose_trial(
            args.seed,
            number,
            ranks=ranks,
            steps=args.steps,
            # A job that was over before its signal came may have been faster than the undisturbed one.
            step_seconds=undisturbed.step_seconds / attempt,
            kinds=args.kinds,
            second=self.chance(number, "again") < args.second,
            two_at_once=ranks >= 4 and self.chance(number, "at once") < args.two_at_once,
        )
        return trial, undisturbed

    def trial(self, number: int) -> tuple[Trial, TrialVerdict, list[str]] | None:
        """Make a trial; return it with the ends of what it said if it did not pass; None if time is up."""
        if self.over.is_set() or (self.last_begin is not None and time.monotonic() > self.last_begin):
            return None
        for attempt in range(1, ATTEMPTS + 1):
            trial, undisturbed = self.choose(number, attempt)
            folder = self.folder / f"{number}-{attempt}"
            try:
                verdict = self.attempt(trial, folder, undisturbed)
            except TimeoutError as error:
                verdict = TrialVerdict(str(trial), None, None, None, None, 0, str(error))
            if self.over.is_set():
                return None
            if verdict is not None:
                outputs = sorted(folder.rglob(OUTPUT)) if verdict.reason else []
                if attempt > 1:
                    verdict = replace(verdict, failure=f"{trial} (attempt {attempt} at a failure in time)")
                return trial, verdict, [path.read_text()[-4000:] for path in outputs]
        reason = f"in {ATTEMPTS} attempts the job was over before its failure came"
        return trial, TrialVerdict(str(trial), None, None, None, None, 0, reason), []

    def attempt(self, trial: Trial, folder: Path, undisturbed: Run) -> TrialVerdict | None:
        """Return what came of a trial, None if its failure came too late."""
        example, ranks = self.place(trial.number)
        options = ["--max-restarts", str(trial.failures)]
        if trial.kind == "gil-hold":  # its rank is alive, so the others would wait nine minutes for it
            options += ["--stall-timeout", STALL_TIMEOUT]
        run = run_job(
            self.command(example, options, privileged=trial.kind != UNWRITABLE),
            folder,
            ranks=ranks,
            faults=trial.faults,
            strikes=trial.strikes,
            hang_timeout=SILENT_TIMEOUT if is_silent(trial.kind) else 60.0,
            time_limit=TIME_LIMIT,
        )
        if trial.missed(run):
            return None
        if trial.kind not in STOPPING_KINDS:
            return judge(trial, run, undisturbed, UNSEEDED)
        directory, again = folder / CHECKPOINTS, folder / "again"
        saved = max((record.step for record in folders.find(directory) if record.kind == "rank"), default=0)
        if trial.cut is not None and saved > 0:
            cut_off(trial, directory)
        shutil.copytree(directory, again / CHECKPOINTS, ignore=shutil.ignore_patterns(FILE_NAME))
        options = ["--max-restarts", "0"]
        resumed = run_job(self.command(example, options), again, ranks=ranks, time_limit=TIME_LIMIT)
        return judge_resumed(trial, run, resumed, undisturbed, saved=saved, ignored=UNSEEDED)


class CampaignInPlace(Campaign):
    """Of transparent mode, and of a script that itself prints what it ends with."""

    @cached_property
    def has_criu(self) -> bool:
        """Whether workers can be moved here."""
        return "error" not in moved_process.try_it()

    def ended(self, run: Run, folder: Path) -> Run:
        printed = (folder / OUTPUT).read_text()
        return replace(run, final=final_as_printed(printed, run.restarts))

    def choose(self, number: int, attempt: int) -> tuple[Trial, Run]:
        example, ranks = self.place(number)
        trial = trials_in_place.choose_trial(
            self.args.seed,
            number,
            ranks=ranks,
            steps=self.args.steps,
            kinds=self.args.kinds,
            second=self.chance(number, "again") < self.args.second,
            two_at_once=self.chance(number, "at once") < self.args.two_at_once,
            attempt=attempt,
        )
        return trial, self.reference(example, ranks)

    def attempt(self, trial: Trial, folder: Path, undisturbed: Run) -> TrialVerdict | None:
        example, ranks = self.place(trial.number)
        options = ["--mode", "transparent", "--warm-spares", "0"]
        options += ["--checkpoint-dir", str(folder / CHECKPOINTS)]
        options += ["--no-state-on-device"] if self.args.state_on_device is False else []
        variables = {"JITCKPT_PROXY_SPARE": str(trial.number // 2 % 2)}
        if trial.kind in LASTING_KINDS:
            options += ["--broken-device", "move" if self.has_criu else "exchange"]
            variables["SOFTGPU_DEVICES"] = str(ranks + len(trial.faults))
        run = run_job(
            self.command(example, options),
            folder,
            ranks=ranks,
            faults=trial.faults,
            strikes=trial.strikes,
            hang_timeout=SILENT_IN_PLACE if is_silent(trial.kind) else 60.0,
            time_limit=TIME_LIMIT,
            # By turns, without the spares of workers, which are not replaced in this mode.
            variables=variables,
        )
        if trials_in_place.came_too_late(trial, run):
            return None
        return trials_in_place.judge(trial, self.ended(run, folder), undisturbed)


class CampaignOfMoves(CampaignInPlace):
    """Of two hosts of two ranks in transparent mode, and hosts that stand by, to which ranks move."""

    def choose(self, number: int, attempt: int) -> tuple[Trial, Run]:
        args = self.args
        trial = trials_of_moves.choose_trial(
            args.seed, number, steps=args.steps, kinds=args.kinds, attempt=attempt
        )
        return trial, self.reference(*self.place(number))

    def attempt(self, trial: Trial, folder: Path, undisturbed: Run) -> TrialVerdict | None:
        example, _ = self.place(trial.number)
        options = ["--mode", "transparent", "--warm-spares", "0", "--max-restarts", "0"]
        options += ["--broken-device", "move", "--move-wait", str(MOVE_WAIT), *trials_of_moves.options(trial)]
        run = run_on_hosts(
            self.command(example, options),
            folder,
            ranks=trials_of_moves.ranks_of_hosts(trial),
            devices=trials_of_moves.devices_of_hosts(trial),
            own_directories=True,
            faults=trial.faults,
            time_limit=TIME_LIMIT_ON_HOSTS,
        )
        if trials_of_moves.came_too_late(trial, run):
            return None
        printed = final_as_printed(said_in(folder))
        return trials_of_moves.judge(trial, replace(run, final=printed), undisturbed)


class CampaignOnHosts(Campaign):
    """Of one rank on each of three hosts, which have one checkpoint directory or one each."""

    def choose(self, number: int, attempt: int) -> tuple[Trial, Run]:
        undisturbed = self.reference(*self.place(number))
        trial = trials_on_hosts.choose_trial(
            self.args.seed,
            number,
            steps=self.args.steps,
            step_seconds=undisturbed.step_seconds,
            kinds=self.args.kinds,
            second=self.chance(number, "again") < self.args.second,
        )
        return trial, undisturbed

    def attempt(self, trial: Trial, folder: Path, undisturbed: Run) -> TrialVerdict | None:
        example, _ = self.place(trial.number)
        options = ["--warm-spares", "0", "--max-restarts", str(trial.failures)]
        options += ["--host-timeout", HOST_TIMEOUT, "--rdzv-conf", "keep_alive_interval=2"]
        run = run_on_hosts(
            self.command(example, options),
            folder,
            own_directories=trials_on_hosts.has_own_directories(self.args.seed, trial.number),
            faults=trial.faults,
            strikes=trial.strikes,
            time_limit=TIME_LIMIT_ON_HOSTS,
        )
        if trials_on_hosts.missed(trial, run):
            return None
        return trials_on_hosts.judge_on_hosts(trial, run, undisturbed, said_in(folder), UNSEEDED)


class CampaignAtEtcd(Campaign):
    """Of jobs whose hosts meet at etcd; three ranks on three hosts, or two and a host that stands by."""

    def choose(self, number: int, attempt: int) -> tuple[Trial, Run]:
        example, ranks = self.place(number)
        undisturbed = self.reference(example, ranks)
        trial = trials_at_etcd.choose_trial(
            self.args.seed,
            number,
            ranks=ranks,
            steps=self.args.steps,
            step_seconds=undisturbed.step_seconds / attempt,
            kinds=self.args.kinds,
        )
        return trial, undisturbed

    def attempt(self, trial: Trial, folder: Path, undisturbed: Run) -> TrialVerdict | None:
        example, ranks = self.place(trial.number)
        options = ["--warm-spares", "0", "--max-restarts", str(trials_at_etcd.RESTARTS)]
        run = run_on_hosts(
            self.command(example, [*options, "--host-timeout", HOST_TIMEOUT]),
            folder,
            own_directories=trials_on_hosts.has_own_directories(self.args.seed, trial.number),
            faults=trial.faults,
            strikes=trial.strikes,
            time_limit=TIME_LIMIT_ON_HOSTS,
            coordination=True,
            ranks=(1,) * ranks + (0,) * (HOSTS - ranks),
        )
        if trials_at_etcd.missed(trial, run):
            return None
        return trials_at_etcd.judge(trial, run, undisturbed, said_in(folder), UNSEEDED)


class CampaignInMemory(Campaign):
    """Of jobs on two to five hosts, which have a checkpoint directory each where memory is to suffice."""

    def spread(self, number: int) -> str:
        ranks = self.place(number)[1]
        hosts = len(trials_in_memory.layout(self.args.seed, number, ranks))
        return f"{ranks} on {hosts} hosts" + f", {self.tier(number)}" * (len(self.args.memory_tier) > 1)

    def tier(self, number: int) -> str:
        hosts = len(trials_in_memory.layout(self.args.seed, number, self.place(number)[1]))
        return trials_in_memory.tier_of(self.args.seed, number, self.args.memory_tier, hosts)

    def choose(self, number: int, attempt: int) -> tuple[Trial, Run]:
        example, ranks = self.place(number)
        trial = trials_in_memory.choose_trial(
            self.args.seed,
            number,
            ranks=ranks,
            steps=self.args.steps,
            step_seconds=self.reference(example, ranks).step_seconds / attempt,
            kinds=self.args.kinds,
            tier=self.tier(number),
            has_replicas=example.stem in REPLICATED,
        )
        return trial, self.reference(example, ranks, self.arguments(trial))

    def arguments(self, trial: Trial) -> Sequence[str]:
        return trials_in_memory.MUCH_STATE if trial.kind == trials_in_memory.FULL else ()

    def attempt(self, trial: Trial, folder: Path, undisturbed: Run) -> TrialVerdict | None:
        example, ranks = self.place(trial.number)
        options = ["--warm-spares", "0", "--max-restarts", "4", "--memory-tier", self.tier(trial.number)]
        options += ["--host-timeout", HOST_TIMEOUT, "--rdzv-conf", "keep_alive_interval=2"]
        own = trials_in_memory.has_own_directories(trial)
        if trials_in_memory.is_of_several(trial):  # else the one host that is left would wait for the two
            options += ["--silent-hosts", "dead"]
        if trial.kind == trials_in_memory.FULL:
            options += trials_in_memory.LEAST_BUDGET
        command = [*self.command(example, options), *self.arguments(trial)]
        run = run_on_hosts(
            [*command, "--save-every", str(SAVED_EVERY * (not own))],
            folder,
            ranks=trials_in_memory.layout(self.args.seed, trial.number, ranks),
            own_directories=own,
            faults=trial.faults,
            strikes=trial.strikes,
            time_limit=TIME_LIMIT_ON_HOSTS,
        )
        if trials_in_memory.missed(trial, run):
            return None
        has_replicas, said = example.stem in REPLICATED, said_in(folder)
        return trials_in_memory.judge(
            trial, run, undisturbed, folder, UNSEEDED, has_replicas=has_replicas, said=said
        )


def said_in(folder: Path) -> str:
    """Return what all agents and ranks of a run have said."""
    return "".join(path.read_text() for path in folder.rglob(OUTPUT))


CAMPAIGNS = {
    "user": Campaign,
    "transparent": CampaignInPlace,
    "hosts": CampaignOnHosts,
    "etcd": CampaignAtEtcd,  # of mode hosts, with --coordination
    "memory": CampaignInMemory,
    "moves": CampaignOfMoves,
}


def tell(console: Console, campaign: Campaign, verdicts: dict[int, TrialVerdict]) -> None:
    table = Table(title=f"{campaign.args.steps} steps, seed {campaign.args.seed}", title_justify="left")
    left = ("example", "failure", "verdict")
    for heading in ("", "example", "ranks", "failure", "went on from", "redone", "recovery", "verdict"):
        table.add_column(heading, justify="left" if heading in left else "right")
    for number, verdict in verdicts.items():
        example, _ = campaign.place(number)
        recovery = f"{verdict.recovery_seconds:.1f} s" if verdict.recovery_seconds is not None else "-"
        step, redone = ("-" if value is None else str(value) for value in (verdict.step, verdict.redone))
        place = (str(number), example.stem.removeprefix("train_"), campaign.spread(number), verdict.failure)
        said = verdict.reason or verdict.note or "equal bit for bit"
        table.add_row(*place, step, redone, recovery, said)
    console.print(table)
    console.print(in_figures(list(verdicts.values())), highlight=False)
    passed = sum(not verdict.reason for verdict in verdicts.values())
    console.print("Bit for bit equal to the undisturbed run, with nothing left behind:")
    console.print(f"{passed} of {len(verdicts)}", highlight=False)


def in_figures(verdicts: Sequence[TrialVerdict]) -> str:
    """Return how long recoveries took, what was done again, and the processor time."""
    sentences = []
    if times := sorted(v.recovery_seconds for v in verdicts if v.recovery_seconds is not None):
        most = times[min(len(times) - 1, len(times) * 9 // 10)]
        sentences.append(
            f"From a failure's detection to the slowest rank's first new step: median "
            f"{statistics.median(times):.1f} s, 90 % within {most:.1f} s, at most {times[-1]:.1f} s."
        )
    redone = Counter(v.redone for v in verdicts)
    counts = ", ".join(
        f"{'all' if number is None else number} in {redone[number]}"
        for number in sorted(redone, key=lambda number: (number is None, number))
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    each = (used.ru_utime + used.ru_stime) / max(1, len(verdicts))
    sentences += [
        f"{what[0].upper()}{what[1:]}: {count} of these."
        for what, count in Counter(v.note for v in verdicts if v.note and not v.reason).items()
    ]
    sentences.append(f"Minibatches redone: {counts} trials. Processor time of a trial: {each:.1f} s.")
    return "\n".join(sentences)


def in_short(trial: Trial, verdict: TrialVerdict) -> str:
    said = verdict.reason or verdict.note or "equal bit for bit"
    recovery = "" if verdict.recovery_seconds is None else f", {verdict.recovery_seconds:.2f} s"
    step = "" if verdict.step is None else f" (from step {verdict.step}, redone {verdict.redone}{recovery})"
    return f"trial {trial.number}: {trial}{step}: {said}"


@contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="jitckpt-campaign-") as temporary:
        yield Path(temporary)


def main() -> int:
    if "hostile" in sys.argv and sys.argv[sys.argv.index("hostile") - 1] == "--mode":
        return campaign_hostile.main(sys.argv[1:])
    args = parse_arguments()
    end_in_order()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(START), os.environ.get("PYTHONPATH"))))
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 180)
    numbers = range(args.first, args.first + args.trials)
    verdicts: dict[int, TrialVerdict] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("trials"), TimeRemainingColumn())
    progress = shown_progress(*columns)
    with folder_for(args.keep) as folder, progress:
        campaign = CAMPAIGNS[args.coordination or args.mode](args, folder)
        pool = ThreadPoolExecutor(args.parallel)
        try:
            for made in progress.track(pool.map(campaign.trial, numbers), total=args.trials):
                if made is None:
                    break
                trial, verdict, output = made
                verdicts[trial.number] = verdict
                where = f"{campaign.place(trial.number)[0].stem}, ranks: {campaign.spread(trial.number)}"
                said = "\n".join((f"{in_short(trial, verdict)} ({where})", *output))
                console.print(said, markup=False, highlight=False, soft_wrap=True)
        finally:
            campaign.over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            kill_running()
            pool.shutdown()
    if len(verdicts) < args.trials:
        left = args.trials - len(verdicts)
        console.print(f"No time was left for {left} of {args.trials} trials.", highlight=False)
    passed = len(verdicts) == args.trials and all(not verdict.reason for verdict in verdicts.values())
    if args.json:
        command = shlex.join(["scripts/fault-campaign", *sys.argv[1:]])
        results = {number: asdict(verdict) for number, verdict in verdicts.items()}
        print(json.dumps({"command": command, "passed": passed, "results": results}))
    else:
        tell(console, campaign, verdicts)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
