"""Whether two halves of a job ever went on at once, from all that lies in its checkpoint directories later.

It takes nothing on trust of what fences off a host (saves/starts.py): it looks at the order in which starts
have written into each log, at what each rank did in each, and at what the saves say of themselves.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jitckpt.events import Event, read_events
from jitckpt.saves import layout, starts

PROGRESS = (
    "restored",
    "first_step",
    "save_ended",
    "periodic_save",
    "finished",
)  # events of a rank that goes on


@dataclass(frozen=True)
class Noted:
    """A start that has begun. went_on_from: which step, None if it is not known that it did."""

    number: int
    revision: int
    went_on_from: int | None


@dataclass(frozen=True)
class SeenSave:
    """A save that could be taken for one of the job: of which start (0: it says none), step and rank."""

    start: int
    step: int
    rank: int
    path: str


@dataclass(frozen=True)
class Directory:
    """What one checkpoint directory tells. log: its events, in the order in which they were written.

    set_aside: whether all ranks go on here, each of which puts aside what it had saved of later steps.
    """

    starts: Sequence[Noted]
    log: Sequence[Event]
    saves: Sequence[SeenSave]
    set_aside: bool = True


def found(directories: Sequence[Directory]) -> list[str]:
    """Return a clause for each sign that two halves went on at once; none if they did not."""
    bases = {
        noted.number: noted.went_on_from
        for directory in directories
        for noted in directory.starts
        if noted.went_on_from is not None
    }
    signs = list(_double_starts(directories))
    signs += _double_ranks(directories)
    for directory in directories:
        signs += _late_events(directory.log)
        signs += _revived(directory.log, bases)
        signs += _late_saves(directory, bases)
    return signs


def _double_starts(directories: Sequence[Directory]) -> Iterator[str]:
    """Starts of one number that are not the same."""
    known: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for directory in directories:
        for noted in directory.starts:
            if noted.revision:
                known[noted.number].add(("revision", noted.revision))
            if noted.went_on_from is not None:
                known[noted.number].add(("from step", noted.went_on_from))
    for number, facts in sorted(known.items()):
        for what, values in groupby(sorted(facts), key=lambda fact: fact[0]):
            different = [str(value) for _, value in values]
            if len(different) > 1:
                yield f"there are several starts {number}: {what} {' and '.join(different)}"


def _double_ranks(directories: Sequence[Directory]) -> Iterator[str]:
    """Ranks that have gone on twice in one start: each half had one."""
    events = [event for directory in directories for event in directory.log]
    firsts = Counter(
        (0 if "start" in event else run, event.get("start", 0), event["restart"], event["rank"])
        for run, event in _by_run(sorted(events, key=lambda event: event["clock"]))
        if event["event"] == "first_step"
    )
    for (_, start, restart, rank), count in sorted(firsts.items()):
        if count > 1:
            yield f"rank {rank} went on {count} times in restart {restart} (start {start})"


def _by_run(log: Iterable[Event]) -> Iterator[tuple[int, Event]]:
    """Yield with each event which run of the job it is of, as far as its first start tells."""
    run = 0
    for event in log:
        run += event["event"] == "job_started"
        yield run, event


def _late_events(log: Sequence[Event]) -> Iterator[str]:
    """Events of a start that were written when a later one had written some.

    Where starts have no numbers, of the restarts of a run only those which tell that a rank went on.
    """
    newest, restart, of_run = 0, 0, 0
    for run, event in _by_run(log):
        start = event.get("start", 0)
        if run != of_run:
            of_run, restart = run, 0
        if 0 < start < newest:
            yield f"start {start} has written {event['event']} after start {newest}"
        elif start == 0 and event["event"] in PROGRESS and event["restart"] < restart:
            yield f"restart {event['restart']} has written {event['event']} after restart {restart}"
        newest, restart = max(newest, start), max(restart, event["restart"])


def _revived(log: Sequence[Event], bases: Mapping[int, int]) -> Iterator[str]:
    """States that a start has gone on from although one before it had left them behind."""
    made_by: dict[str, int] = {}
    for event in log:
        start = event.get("start", 0)
        if event["event"] in ("save_ended", "periodic_save"):
            made_by[event["path"]] = start
        elif event["event"] == "restored" and (maker := made_by.get(event["path"], 0)):
            for between, base in sorted(bases.items()):
                if maker < between < start and base < event["step"]:
                    yield (
                        f"start {start} has gone on from step {event['step']} of start {maker}, which start "
                        f"{between} had left at step {base}"
                    )
                    break


def _late_saves(directory: Directory, bases: Mapping[int, int]) -> Iterator[str]:
    """Saves that came when a later start had gone on from an earlier step, and put aside what was there."""
    here = {noted.number for noted in directory.starts if noted.revision}
    for saved in directory.saves if directory.set_aside else ():
        for later, base in sorted(bases.items()):
            if 0 < saved.start < later and later in here and base < saved.step:
                yield (
                    f"start {saved.start} has saved step {saved.step} of rank {saved.rank} ({saved.path}) "
                    f"after start {later} had gone on from step {base}"
                )
                break


# What is read.


def read(paths: Iterable[Path], *, set_aside: bool = True) -> list[Directory]:
    """Return what checkpoint directories tell; one that is not there tells nothing."""
    return [_read(path, set_aside) for path in paths if path.is_dir()]


def _read(path: Path, set_aside: bool) -> Directory:
    known = starts.read(path)
    revisions = starts.revisions(path)
    numbers = sorted(known.went_on_from.keys() | revisions.keys())
    log: list[Event] = []
    with suppress(FileNotFoundError):
        log = read_events(path)[0]
    return Directory(
        [Noted(number, revisions.get(number, 0), known.went_on_from.get(number)) for number in numbers],
        log,
        list(_saves(path)),
        set_aside,
    )


def _saves(root: Path) -> Iterator[SeenSave]:
    for path in sorted(root.glob(f"step-*/*/{layout.METADATA_FILE}")):
        if layout.parse_rank_folder(path.parent.name) is not None:
            metadata = layout.parse_metadata(path.read_bytes())
            identity = metadata.identity
            yield SeenSave(identity.start, metadata.step, identity.rank, str(path.parent.relative_to(root)))
