"""Hostile runs: processes are killed and stopped, disk, network and descriptors fail, strangers come."""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from campaign_hostile import attacks
from campaign_hostile.job import Outcome, Start
from campaign_hostile.place import PLAIN, Place
from campaign_hostile.trials import CLOCK, HOSTS, KINDS, USER, Trial, choose
from campaign_hostile.verdict import FELL, Verdict, judge
from jitckpt.cli.progress import shown_progress
from jitckpt.errors import HostsError
from jitckpt.rehearsal.namespaces import Namespaces, namespaces
from jitckpt.system.signals import end_in_order

TRAININGS = Path(__file__).resolve().parents[1] / "campaign_trainings"
NUMBER_OF_HOSTS = 3
PAUSE = 0.08  # seconds in each step, for something to happen in
ATTEMPTS = 4  # at a trial whose attack came when the job was over


@dataclass(frozen=True)
class Undisturbed:
    final: Mapping[int, str]
    start_seconds: float  # until the first step
    seconds: float  # from there to the end


class Campaign:
    """The undisturbed runs, each made once, and the trials, some at a time."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.over = threading.Event()
        self._undisturbed: dict[int, Undisturbed] = {}
        self._making = threading.Lock()
        self._last_begin = None if args.minutes is None else time.monotonic() + 60 * args.minutes

    def training(self) -> list[str]:
        return [str(TRAININGS / "data.py"), "--steps", str(self.args.steps), "--pause", str(PAUSE)]

    def trial(self, number: int) -> tuple[int, Verdict] | None:
        """Make a trial; None if time is up."""
        if self.over.is_set() or (self._last_begin is not None and time.monotonic() > self._last_begin):
            return None
        kinds = self.args.kinds
        for attempt in range(1, ATTEMPTS + 1):
            drawn = choose(
                self.args.seed,
                number,
                kinds=kinds,
                hosts=NUMBER_OF_HOSTS,
                start_seconds=8,
                seconds=6,
                attempt=1,
            )
            usual = self.undisturbed(NUMBER_OF_HOSTS if drawn.mode == HOSTS else 2)
            trial = choose(
                self.args.seed,
                number,
                kinds=kinds,
                hosts=NUMBER_OF_HOSTS,
                start_seconds=usual.start_seconds,
                seconds=usual.seconds,
                attempt=attempt,
            )
            folder = self.folder / f"{number}-{attempt}"
            made = self.make(trial, folder)
            if made is None:
                shutil.rmtree(folder)
                continue
            verdict = judge(trial, made, usual.final)
            if verdict.result != FELL and not self.args.keep:
                shutil.rmtree(folder)
            return number, verdict
        return number, Verdict(str(trial), FELL, ("in no attempt did it come before the job was over",), 0, 0)

    def undisturbed(self, ranks: int) -> Undisturbed:
        """Return what comes of a job to which nothing happens, on one host; each is made once."""
        with self._making:
            if ranks not in self._undisturbed:
                folder = self.folder / f"undisturbed-{ranks}"
                with self.places(folder, PLAIN, USER, 1) as (places, _):
                    start = Start(places, self.training(), folder / "start-1", USER, ranks=ranks)
                    outcome = start.finish(self.args.time_limit)
                    outcome = replace(outcome, left=tuple(start.left()))
                    events = start.events()
                verdict = judge(Trial(0, "kill-rank", USER, 1, ()), [outcome], outcome.final)
                if verdict.result == FELL or len(outcome.final) != ranks:
                    raise SystemExit(
                        f"{outcome.output[-4000:]}\nThe undisturbed run failed: {'; '.join(verdict.reasons)}"
                    )
                first = next(event["clock"] for event in events if event["event"] == "first_step")
                before = first - start.began
                self._undisturbed[ranks] = Undisturbed(outcome.final, before, outcome.seconds - before)
            return self._undisturbed[ranks]

    def make(self, trial: Trial, folder: Path) -> list[Outcome] | None:
        """Let the job be hit, and start it again if that has ended it; None if nothing came in time."""
        with self.places(folder, trial.kind.disk, trial.mode, trial.hosts) as (places, network):
            starts = []
            clocks = trial.kind.what == CLOCK
            start = Start(places, self.training(), folder / "start-1", trial.mode, clocks=clocks)
            hits = [False] * len(trial.attacks)

            def perform(number: int) -> None:
                hits[number] = attacks.perform(trial.attacks[number], start, network)

            threads = [threading.Thread(target=perform, args=(number,)) for number in range(len(hits))]
            for thread in threads:
                thread.start()
            outcome = start.finish(self.args.time_limit)
            for thread in threads:
                thread.join()
            starts.append(replace(outcome, left=tuple(start.left())))
            if not any(hits):  # the second may have ended the job before the first found anybody
                return None
            if any(outcome.statuses):
                again = Start(places, self.training(), folder / "start-2", trial.mode)
                outcome = again.finish(self.args.time_limit)
                starts.append(replace(outcome, left=tuple(again.left())))
            if places[0].seen != places[0].disk:
                shutil.copytree(places[0].seen, folder / "disk-at-the-end", dirs_exist_ok=True)
            return starts

    @contextmanager
    def places(
        self, folder: Path, disk: str, mode: str, hosts: int
    ) -> Iterator[tuple[list[Place], Namespaces | None]]:
        """Make the hosts of a job."""
        with ExitStack() as stack:
            network = stack.enter_context(namespaces(hosts)) if mode == HOSTS else None
            found = []
            for host in range(hosts):
                own = {} if network is None else {"network": network.on(host)}
                place = Place(folder / f"host-{host}", folder / "disk", disk, **own)
                stack.callback(place.close)
                found.append(place)
            yield found, network


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fault-campaign", usage="%(prog)s --mode hostile [options]", description=__doc__
    )
    parser.add_argument("--mode", choices=("hostile",), required=True)
    parser.add_argument("--trials", type=int, default=20, help="how many runs (default 20)")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="begin with trial N (default 1)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="trials at a time (default 1)")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no trial later than that")
    parser.add_argument("--seed", type=int, default=0, help="chooses what happens (default 0)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default 60)")
    parser.add_argument(
        "--time-limit", type=float, default=240, metavar="SECONDS", help="of each start (default 240)"
    )
    parser.add_argument("--kinds", help=f"default all: {', '.join(KINDS)}")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep what all runs left, not the fallen only"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    args.kinds = args.kinds.split(",") if args.kinds else list(KINDS)
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    if args.trials < 1 or args.first < 1 or args.parallel < 1 or args.steps < 8:
        parser.error("--trials, --first and --parallel must be at least 1 and --steps at least 8")
    if args.keep is not None and args.keep.exists():
        parser.error(f"{args.keep} is there already; name a folder that is not")
    return args


def main(words: Sequence[str]) -> int:
    args = parse_arguments(words)
    end_in_order()
    if args.keep is not None:
        args.keep.mkdir(parents=True)
    folder = args.keep.resolve() if args.keep else Path(tempfile.mkdtemp(prefix="jitckpt-hostile-"))
    campaign = Campaign(args, folder)
    verdicts: dict[int, Verdict] = {}
    console = Console(stderr=args.json)
    columns = (TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = shown_progress(*columns)
    pool = ThreadPoolExecutor(args.parallel)
    progress.start()
    try:
        numbers = range(args.first, args.first + args.trials)
        for made in progress.track(pool.map(campaign.trial, numbers), total=args.trials):
            if made is None:
                break
            number, verdict = made
            verdicts[number] = verdict
            console.print(in_short(number, verdict), markup=False, highlight=False, soft_wrap=True)
    except HostsError as error:
        print(f"jitckpt: {error}", file=sys.stderr)
        return 2
    finally:
        progress.stop()
        campaign.over.set()
        pool.shutdown(cancel_futures=True)
        fallen = any(verdict.result == FELL for verdict in verdicts.values())
        if not args.keep and not fallen:
            shutil.rmtree(folder, ignore_errors=True)
    counts = Counter(verdict.result for verdict in verdicts.values())
    passed = len(verdicts) == args.trials and not counts[FELL]
    if args.json:
        command = shlex.join(["scripts/fault-campaign", *words])
        results = {number: asdict(verdict) for number, verdict in verdicts.items()}
        print(json.dumps({"command": command, "passed": passed, "results": results}))
    else:
        tell(args, verdicts, folder)
    return 0 if passed else 1


def in_short(number: int, verdict: Verdict) -> str:
    said = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
    return f"{number}: {verdict.result}, {verdict.seconds:.0f} s: {verdict.trial}{said}"


def tell(args: argparse.Namespace, verdicts: dict[int, Verdict], folder: Path) -> None:
    by_kind: dict[str, Counter[str]] = {}
    for verdict in verdicts.values():
        by_kind.setdefault(verdict.trial.split()[0], Counter())[verdict.result] += 1
    for kind, counts in sorted(by_kind.items()):
        print(f"  {kind:28} " + ", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    if len(verdicts) < args.trials:
        print(f"No time was left for {args.trials - len(verdicts)} of {args.trials} trials.")
    fallen = [number for number, verdict in verdicts.items() if verdict.result == FELL]
    if fallen:
        print(f"What the fallen ones ({', '.join(map(str, fallen))}) left is in {folder}.")
    print("Bit for bit equal or with the right sentence, with nothing left behind:")
    print(f"{len(verdicts) - len(fallen)} of {len(verdicts)}")
