"""Which starts of a job have begun in a checkpoint directory, and where each went on: what fences off a host.

A coordination service numbers the starts, so that a higher number is a later one. Each is noted here before
its ranks train, and a process of an earlier one, that was cut off or stopped meanwhile, finds that before it
writes or removes anything. No file system can look and write in one moment: what lands all the same is told
by its number. A save is of the job as it went on if no later start has gone on from an earlier step.

DIR/starts/start-0000000007.json              start 7 has begun: its revision in the service
DIR/starts/start-0000000007-from-0000000120   it has gone on from step 120

Without a coordination service starts have no numbers (0): nothing is noted, and nobody is fenced off.
"""

import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jitckpt.errors import SaveError
from jitckpt.saves.renames import make_folder, put_where_nothing_is, sync_folder
from jitckpt.system import regular_file

FOLDER = "starts"
_BEGUN = re.compile(r"start-(\d{10,18})\.json")
_WENT_ON = re.compile(r"start-(\d{10,18})-from-(\d{10,18})")


class Superseded(SaveError):
    """The job has gone on without this process."""


@dataclass(frozen=True)
class Start:
    """A start, and the revision by which the service tells it from every other; 0: it has no number."""

    number: int = 0
    revision: int = 0

    @classmethod
    def parse(cls, text: str) -> "Start":
        """Return what str() has made; of "" the start without a number. Raises ValueError."""
        return cls(*map(int, text.split()))

    def __str__(self) -> str:
        return f"{self.number} {self.revision}" if self.number else ""

    def document(self) -> bytes:
        """Return what is noted as it begins."""
        return json.dumps({"number": self.number, "revision": self.revision}).encode()


@dataclass(frozen=True)
class Starts:
    """What is noted. went_on_from: the step, by number; of one that never went on there is none."""

    newest: int
    went_on_from: Mapping[int, int]

    def problem(self, number: int, step: int) -> str | None:
        """Return why the state that start `number` had after `step` is not the job's, as a clause.

        Where every later start went on from this step or a later one, the state is one of those before.
        """
        for later, base in sorted(self.went_on_from.items()):
            if 0 < number < later and base < step:
                return f"is of start {number}, but start {later} of the job has gone on from step {base}"
        return None


def begun_name(number: int) -> str:
    """Return the name under which it is noted that a start has begun."""
    return f"start-{number:010d}.json"


def went_on_name(number: int, step: int) -> str:
    """Return the name that says from which step it has gone on."""
    return f"start-{number:010d}-from-{step:010d}"


def read(root: Path) -> Starts:
    """Return what is noted in a checkpoint directory. Raises OSError."""
    try:
        return of_names(os.listdir(root / FOLDER))
    except FileNotFoundError:
        return Starts(0, {})


def of_names(names: Iterable[str]) -> Starts:
    """Return what the names in such a folder say."""
    names = list(names)
    begun = [int(found[1]) for name in names if (found := _BEGUN.fullmatch(name))]
    bases: dict[int, int] = {}
    for name in names:
        if found := _WENT_ON.fullmatch(name):
            number, step = int(found[1]), int(found[2])
            bases[number] = min(step, bases.get(number, step))
    return Starts(max([0, *begun, *bases]), bases)


def revisions(root: Path) -> dict[int, int]:
    """Return the starts that have begun here, by number, and their revisions. Raises OSError."""
    paths = sorted((root / FOLDER).glob("start-*.json"))
    return {int(found[1]): _revision(path) or 0 for path in paths if (found := _BEGUN.fullmatch(path.name))}


def is_superseded(root: Path, number: int) -> bool:
    """Return whether a later start than this one has begun. Raises OSError."""
    return number > 0 and read(root).newest > number


def check(root: Path, number: int) -> None:
    """Raise Superseded if a later start than this one has begun; OSError."""
    if number > 0:
        check_newest(read(root).newest, number, str(root))


def check_newest(newest: int, number: int, where: str) -> None:
    """Raise Superseded if a later start than this one has begun."""
    if 0 < number < newest:
        raise Superseded(
            f"The job has gone on without this host: start {newest} has begun in {where}, and this is start "
            f"{number}. Nothing is written there."
        )


def note_begun(root: Path, start: Start) -> None:
    """Note that a start begins. Raises Superseded if a later one, or another of this number, has; OSError."""
    if start.number == 0:
        return
    check(root, start.number)
    path = root / FOLDER / begun_name(start.number)
    if not path.exists():
        make_folder(path.parent)
        fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        fresh.write_bytes(start.document())
        try:
            put_where_nothing_is(fresh, path)
            sync_folder(path.parent)
        except FileExistsError:
            pass  # another process of it was first, or what is read below
        finally:
            fresh.unlink(missing_ok=True)
    if (found := _revision(path)) != start.revision:
        raise other_start(str(path), start, found)


def other_start(where: str, start: Start, found: int | None = None) -> Superseded:
    """Return the error where another start of this number has begun. found: its revision."""
    known = "another revision" if found is None else f"revision {found}"
    return Superseded(
        f"{where} is of another start than this one ({known} instead of {start.revision}), as "
        "where a job meets at another etcd, or by another --rdzv-id, than before: give `jitckpt run` "
        "--checkpoint-dir, by which it numbers its starts on from those that are noted there."
    )


def note_going_on(root: Path, number: int, step: int) -> None:
    """Note from which step a start goes on, before it makes the next; the first counts. Raises OSError."""
    if number == 0 or number in read(root).went_on_from:
        return
    path = root / FOLDER / went_on_name(number, step)
    path.touch()
    sync_folder(path.parent)


def note_of_others(root: Path, told: Iterable[tuple[int, int]]) -> None:
    """Note where starts went on that other hosts, with directories of their own, know of. Raises OSError."""
    known = read(root).went_on_from
    for number, step in told:
        if number not in known:
            make_folder(root / FOLDER)
            (root / FOLDER / went_on_name(number, step)).touch()


def _revision(path: Path) -> int | None:
    try:
        found = json.loads(regular_file.content_of(path)).get("revision")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None
