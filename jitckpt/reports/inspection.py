"""What lies in a checkpoint directory: every save with its verdict, and what a restart would make of them.

The step is chosen by jitckpt.saves.selection, the code that a restarted rank runs.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from jitckpt.errors import CheckpointError
from jitckpt.saves import folders, layout, selection
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice

State = Literal["whole", "unusable", "unfinished", "set aside", "other"]
_NOT_A_SAVE = re.compile(r"(unfinished|replaced|set-aside)-(?:[a-z0-9]+-){0,2}((?:rank|local)-\d+)")
PREFIXES: dict[str, tuple[State, str]] = {
    "unfinished": ("unfinished", "it is being written, or its writer was ended before it was whole"),
    "replaced": ("unfinished", "it was being replaced by a newer save of the same step"),
    "set-aside": ("set aside", "it was of a later step than the one that the job went on from"),
}
NOT_OURS = "jitckpt has not written it"


@dataclass(frozen=True)
class FoundSave:
    """One folder or file of a step. kind: rank or local, "" where that is unknown. reason: why it is no use.

    bytes: of all its files, as its metadata says, or as they lie there where it has none. time: when the save
    was finished, seconds since the epoch.
    """

    path: str
    step: int
    kind: str
    rank: int | None
    shard: int | None
    saver: str
    bytes: int
    time: float | None
    state: State
    reason: str


@dataclass(frozen=True)
class InspectedStep:
    """A step with at least one save. whole: a restart could take it. reason: why it could not."""

    step: int
    whole: bool
    reason: str


@dataclass(frozen=True)
class Load:
    """What one rank would load. local: where its own state (random numbers, ...) comes from, None if lost."""

    rank: int
    shard: int
    save: str
    local: str | None


@dataclass(frozen=True)
class Inspection:
    """A checkpoint directory. world_size, shards: of the newest save of its job, 0 where there is none.

    restart: the step that a restart would take; None for a fresh start, or if it would be refused (`refusal`
    says why then). verified: whether every checksum was read, else only the files' sizes were compared.
    """

    directory: str
    job: str | None
    world_size: int
    shards: int
    saves: tuple[FoundSave, ...]
    steps: tuple[InspectedStep, ...]
    restart: int | None
    refusal: str
    loads: tuple[Load, ...]
    verified: bool

    @property
    def status(self) -> int:
        """0: a restart goes on and every finished save is whole; 3: nothing is saved; 1: anything else."""
        if self.refusal or any(save.state == "unusable" for save in self.saves):
            return 1
        return 3 if self.restart is None else 0


def bytes_to_read(directory: Path) -> int:
    """Return how many bytes `inspect` reads with checksums."""
    known = [record.metadata for record in folders.find(directory) if record.metadata]
    return sum(file.size for metadata in known for file in metadata.files)


@dataclass(frozen=True)
class SavedJob:
    """Whose job a restart is taken to be: that of the newest save of the directory's own job.

    fingerprints: of the newest save of each shard. shard_of: the shard of each rank that saved anything.
    """

    identity: Identity
    fingerprints: Mapping[int, str]
    shard_of: Mapping[int, int]

    def identity_of(self, rank: int, shard: int) -> Identity:
        """Return the identity with which a rank would look for a save of this shard."""
        return replace(self.identity, rank=rank, shard=shard, fingerprint=self.fingerprints.get(shard, ""))

    def ranks(self) -> list[Identity]:
        """Return the identities of all ranks whose shard is known."""
        shards = (
            self.shard_of if self.identity.shards > 1 else dict.fromkeys(range(self.identity.world_size), 0)
        )
        return [self.identity_of(rank, shard) for rank, shard in sorted(shards.items())]


def saved_job(records: Sequence[SaveRecord], job: str) -> SavedJob:
    """Return what the saves say of the job; of world size 0 if there is none of it."""
    newest: Identity | None = None
    fingerprints: dict[int, str] = {}
    shard_of: dict[int, int] = {}
    for record in sorted(records, key=lambda record: (-record.step, record.rank)):
        if record.metadata is None or record.metadata.identity.job != job:
            continue
        found = record.metadata.identity
        newest = newest or found
        if (found.world_size, found.shards) == (newest.world_size, newest.shards):
            fingerprints.setdefault(found.shard, found.fingerprint)
            shard_of.setdefault(found.rank, found.shard)
    return SavedJob(newest or Identity(job, "", 0, 0, 0, 0), fingerprints, shard_of)


def inspect(
    directory: Path,
    checksums: bool = False,
    on_read: Callable[[int], object] | None = None,
    verify: Callable[[SaveRecord], str | None] | None = None,
) -> Inspection:
    """Look at every save; on_read is told how many bytes were read. Raises CheckpointError.

    verify: tells why a save is not whole, in the place of a look at its files.
    """
    whole = verify or partial(folders.verify, checksums=checksums, on_read=on_read)
    job_id = folders.read_job(directory)
    records = folders.find(directory)
    job = saved_job(records, job_id or "")

    def problem(record: SaveRecord) -> str | None:
        shard = record.metadata.identity.shard if record.metadata else 0
        misfit = selection.misfit(record, job.identity_of(record.rank, shard))
        return misfit or whole(record)

    problems = {record.path: problem(record) for record in records}
    choices: list[tuple[Identity, Choice]] = []
    refusal = ""
    try:
        # A directory in which all saves are of other jobs is refused too, whoever asks.
        identities = job.ranks() or [job.identity]
        selected = selection.Selection(records, identities[0], lambda record: problems[record.path])
        for identity in identities:
            choice = selected.choice(identity)
            choices += [(identity, choice)] if choice else []
    except CheckpointError as error:
        refusal, choices = str(error), []
    return Inspection(
        directory=str(directory),
        job=job_id,
        world_size=job.identity.world_size,
        shards=job.identity.shards,
        saves=(
            *(_found(directory, record, problems[record.path]) for record in records),
            *_others(directory),
        ),
        steps=tuple(_steps(records, job, problems)),
        restart=choices[0][1].step if choices else None,
        refusal=refusal,
        loads=tuple(_load(directory, identity, choice) for identity, choice in choices),
        verified=checksums,
    )


def _steps(
    records: Sequence[SaveRecord], job: SavedJob, problems: Mapping[Path, str | None]
) -> list[InspectedStep]:
    good: dict[int, set[int]] = {}  # the shards of each step
    for record in records:
        if record.kind == "rank":
            of_step = good.setdefault(record.step, set())
            if record.metadata and problems[record.path] is None:
                of_step.add(record.metadata.identity.shard)
    steps = []
    for step, shards in sorted(good.items(), reverse=True):
        missing = [shard for shard in range(job.identity.shards) if shard not in shards]
        reason = selection.no_whole_save(missing) if missing else "" if shards else "no whole save"
        steps.append(InspectedStep(step, not reason, reason))
    return steps


def _found(directory: Path, record: SaveRecord, problem: str | None) -> FoundSave:
    metadata = record.metadata
    size = (
        sum(file.size for file in metadata.files) + (record.path / layout.METADATA_FILE).stat().st_size
        if metadata
        else _bytes_of(record.path)
    )
    return FoundSave(
        path=str(record.path.relative_to(directory)),
        step=record.step,
        kind=record.kind,
        rank=record.rank,
        shard=metadata.identity.shard if metadata else None,
        saver=metadata.saver if metadata else "",
        bytes=size,
        time=metadata.time if metadata else None,
        state="whole" if problem is None else "unusable" if record.finished else "unfinished",
        reason=problem or "",
    )


def _others(directory: Path) -> list[FoundSave]:
    """What lies in the folders of steps beside saves."""
    found = []
    for step_path in sorted(directory.iterdir(), reverse=True):
        step = layout.parse_step_folder(step_path.name)
        if step is None or not step_path.is_dir():
            continue
        for path in sorted(step_path.iterdir()):
            if layout.parse_rank_folder(path.name) is None and path.name != layout.WHOLE_NOTE:
                found.append(_other(directory, step, path))
    return found


def _other(directory: Path, step: int, path: Path) -> FoundSave:
    state: State = "other"
    kind, rank, reason = "", None, NOT_OURS
    found = _NOT_A_SAVE.fullmatch(path.name)
    parsed = found and layout.parse_rank_folder(found[2])
    if found and parsed:
        (state, reason), (kind, rank) = PREFIXES[found[1]], parsed
    failed = layout.parse_rank_folder(path.stem.removeprefix("error-"))
    if failed is not None and path.name.startswith("error-") and path.suffix == ".txt":
        (kind, rank), reason = failed, "the traceback of a save that failed"
    return FoundSave(
        path=str(path.relative_to(directory)),
        step=step,
        kind=kind,
        rank=rank,
        shard=None,
        saver="",
        bytes=_bytes_of(path),
        time=None,
        state=state,
        reason=f"{path}: {reason}.",
    )


def _bytes_of(path: Path) -> int:
    """The sizes of all files; what vanishes meanwhile (a save gets its final name) does not count."""
    files = (
        [path] if path.is_file() else [Path(where) / n for where, _, names in os.walk(path) for n in names]
    )
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def _load(directory: Path, identity: Identity, choice: Choice) -> Load:
    local = None if choice.local is None else str(choice.local.path.relative_to(directory))
    return Load(identity.rank, identity.shard, str(choice.save.path.relative_to(directory)), local)
