"""Saves on the disk: write one whole or not at all, find what is there, check, read and remove it."""

import errno
import json
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash
from torch import Tensor

from jitckpt.bindings import libc
from jitckpt.encoding import tensor_file
from jitckpt.encoding.staging import Staging
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import CheckpointError, JitckptError, SaveError
from jitckpt.saves import layout, starts
from jitckpt.saves.layout import FileEntry, Identity, Metadata
from jitckpt.saves.renames import exchange, make_folder, put_where_nothing_is, sync_folder
from jitckpt.system import regular_file

READ_BYTES = 4 << 20
PIECE_BYTES = 1 << 20  # that a processor's cache holds
_committing = threading.Lock()  # where a save can take the place of another only in two renames
REPLACED = "replaced-"  # begins the name of a save in whose place a newer one is being put
# What jitckpt puts into the folder of a step, beside which others may put something: saves, and what is left
# of the writing of saves.
_OURS = re.compile(r"(?:(unfinished|replaced|set-aside)-(?:[a-z0-9]+-){0,2})?((?:rank|local)-\d{5,9})")
_ERROR = re.compile(r"error-rank-\d{5,9}\.txt")


@dataclass(frozen=True)
class SaveRecord:
    """A save's folder as it was found: with its metadata, or with the sentence why that can't be used.

    `finished`: it has a metadata file, which is written last. was_whole: so was its step, of all shards.
    """

    path: Path
    step: int
    kind: layout.Kind
    rank: int
    metadata: Metadata | None
    problem: str | None = None
    finished: bool = True
    was_whole: bool = False


@dataclass(frozen=True)
class SavedState:
    """What a built-in save holds: the JSON document and the tensors, on the host."""

    document: dict[str, Json]
    tensors: dict[str, Tensor]


class SaveFolder:
    """The folder of one save, to be used in a `with` statement.

    Files are added to `path`, then `commit` moves it to its place as a whole save; a folder that is left
    without a commit is removed. An older save of the same step stays until then. Every failure of the file
    system becomes a SaveError that says what to do.
    """

    def __init__(
        self,
        root: Path,
        identity: Identity,
        step: int,
        kind: layout.Kind,
        saver: layout.SaverName,
        *,
        by: str = "",
        start: int | None = None,
        nothing_before: bool = False,
    ) -> None:
        """by: who writes it, where this process may write the same save twice at a time.

        start: which writes it; None: the one that has made the state. 0: nobody is fenced off.
        nothing_before: see Metadata.
        """
        self._root, self._identity, self._step, self._kind, self._saver = root, identity, step, kind, saver
        self._start = identity.start if start is None else start
        self._nothing_before = nothing_before
        self._place = root / layout.step_folder(step) / layout.rank_folder(kind, identity.rank)
        # A process that was stopped in the middle of its save may go on beside those of a later start.
        of_start = f"start{self._start}" if self._start else ""
        name = "-".join(filter(None, ("unfinished", of_start, by, self._place.name)))
        self.path = self._place.with_name(name)
        self._files: list[FileEntry] = []
        self._holds_older = False  # the folder under the name of the unfinished one

    def __enter__(self) -> Self:
        with _explained(self.path):
            starts.check(self._root, self._start)
            if self.path.exists():
                shutil.rmtree(self.path)  # left by a process that was killed
            self.path.mkdir(parents=True)
            replaced = self._replaced()
            if replaced.exists() and not self._place.exists():
                replaced.rename(self._place)  # by one that was killed between two renames
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists() and not self._holds_older:
            shutil.rmtree(self.path, onerror=_note_on(error))

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor], staging: Staging | None = None) -> None:
        """Write a safetensors file, through these host buffers if they are given."""
        with _explained(self.path / name), self._new_file(name) as file:
            tensor_file.write(file.append, tensors, staging, file.show)
        self._files.append(FileEntry(name, file.size, file.checksum))

    def add_json(self, name: str, content: Json) -> None:
        """Write a JSON file."""
        with _explained(self.path / name), self._new_file(name) as file:
            file.write(json.dumps(content, allow_nan=False).encode())
        self._files.append(FileEntry(name, file.size, file.checksum))

    def add_checked(self, file: FileEntry) -> None:
        """Take in a file that was written to `path` and is known to be what `file` says."""
        self._files.append(file)

    def add_existing(self) -> None:
        """Take in, and bring to the disk, every file that somebody else has put into the folder."""
        known = {file.name for file in self._files}
        with _explained(self.path):
            for path in sorted(self.path.rglob("*")):
                name = path.relative_to(self.path).as_posix()
                if path.is_dir():
                    sync_folder(path)
                elif name == layout.METADATA_FILE:
                    raise SaveError(_NAME_IS_OURS.format(name=name))
                elif name not in known:
                    if not stat.S_ISREG(path.stat().st_mode):
                        raise SaveError(
                            f"The save function has left {path}, which is no file (but a pipe, a socket or a "
                            "device) and can't be saved."
                        )
                    _sync(path)
                    self._files.append(FileEntry(name, path.stat().st_size, checksum(path)))

    def commit(self) -> tuple[Path, int]:
        """Make the save whole; returns its folder and the bytes written in all.

        Whenever the process is killed, or the machine loses its power, the older save of the same step is
        there, if there was one, or this one. Raises starts.Superseded, and changes nothing, if the job has
        gone on without this process.
        """
        metadata = Metadata(
            self._identity,
            self._kind,
            self._saver,
            self._step,
            time.time(),
            tuple(self._files),
            self._nothing_before,
        ).to_json()
        with _explained(self.path), _committing:
            write_by_rename(self.path / layout.METADATA_FILE, metadata)
            starts.check(self._root, self._start)
            left = self._put_in_place()
            sync_folder(self._place.parent)
            sync_folder(self._root)
        # What is not removed now goes with the next start: the save is whole all the same.
        shutil.rmtree(left, ignore_errors=True)
        return self._place, len(metadata) + sum(file.size for file in self._files)

    def _new_file(self, name: str) -> "HashedFile":
        try:
            return HashedFile(self.path / name)
        except FileExistsError as error:
            raise SaveError(_NAME_IS_OURS.format(name=name)) from error

    def _put_in_place(self) -> Path:
        """Give the folder its name; return where what had it is now, if anything had."""
        try:
            self.path.rename(self._place)
            return self.path
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if exchange(self.path, self._place):
            self._holds_older = True
            return self.path
        # Between these two renames `find` finds the older one under its other name.
        replaced = self._replaced()
        if replaced.exists():
            shutil.rmtree(replaced)
        with suppress(FileNotFoundError):  # another host's agent may write the same local state
            self._place.rename(replaced)
        try:
            self.path.rename(self._place)
        except OSError as error:
            if self._kind != "local" or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return replaced

    def _replaced(self) -> Path:
        return self._place.with_name(REPLACED + self._place.name)


class HashedFile:
    """A new file that knows its size and checksum; leaving the `with` statement brings it to the disk."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._hash = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append to the file."""
        for begin in range(0, len(data), PIECE_BYTES):
            piece = memoryview(data)[begin : begin + PIECE_BYTES]
            self.show(piece)  # just before it is written, so that the processor's cache holds it then
            self.append(piece)

    def show(self, piece: bytes | memoryview) -> None:
        """Take a piece into the checksum; for what comes by `append`, in the same order."""
        self._hash.update(piece)

    def append(self, piece: bytes | memoryview) -> None:
        """Append to the file what is, was or will be shown; may be called on another thread."""
        begin, rest = self.size, memoryview(piece)
        self.size += len(rest)
        while rest:
            rest = rest[self._file.write(rest) :]
        if len(piece) >= PIECE_BYTES:
            # Only sooner: fsync comes, waits for all, and tells of every error.
            libc.begin_sync(self._file.fileno(), begin, len(piece))

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())


def open_directory(root: Path, job: str | None = None) -> str:
    """Make the checkpoint directory if needed and return its job id, made by whoever comes first.

    job: the id that it gets if it has none yet; by default that of the saves in it, whose job.json is lost,
    or a new one. Raises CheckpointError if it can't be written or its job.json is damaged.
    """
    path = root / layout.JOB_FILE
    try:
        make_folder(root)
        if not path.exists():
            fresh = root / f".{layout.JOB_FILE}.{uuid.uuid4().hex}"
            content = {"format": layout.FORMAT, "job": job or _job_of_saves(root) or uuid.uuid4().hex}
            try:
                with HashedFile(fresh) as file:
                    file.write(json.dumps(content).encode())
                put_where_nothing_is(fresh, path)  # unlike a rename it never replaces another rank's
                sync_folder(root)
            except FileExistsError:
                pass  # another rank was first: its id is read below
            finally:
                fresh.unlink(missing_ok=True)
        found = layout.parse_object(regular_file.content_of(path), str(path))
    except OSError as error:
        raise CheckpointError(_sentence(error, root)) from None  # it says all, and ends the user's traceback
    except SaveError as error:
        raise CheckpointError(f"{error} {_WAY_BACK}") from None
    job, version = found.get("job"), found.get("format")
    if type(version) is int and version > layout.FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, which is of a newer jitckpt; this one knows formats up to "
            f"{layout.FORMAT}. Go on with the newer one, or choose another checkpoint directory."
        )
    if not isinstance(job, str) or not job:
        raise CheckpointError(f"{path} has no job id. {_WAY_BACK}")
    return job


_NAME_IS_OURS = (
    "The save function has written {name}, a name that jitckpt itself uses: let it give that file another "
    "one, or put it into a folder."
)
_WAY_BACK = (
    "If it is jitckpt's, put it back or remove it: it is made again as the saves beside it say. Else choose "
    "another checkpoint directory."
)


def _job_of_saves(root: Path) -> str | None:
    """Return the job that all saves in a directory are of, None if there are none."""
    jobs = {record.metadata.identity.job for record in find(root) if record.metadata}
    if len(jobs) > 1:
        example = json.dumps({"job": min(jobs)})
        raise CheckpointError(
            f"{root} has lost its {layout.JOB_FILE}, and holds saves of several jobs "
            f"({', '.join(sorted(jobs))}): write {example} with the right one into "
            f"{root / layout.JOB_FILE}, or choose another checkpoint directory."
        )
    return min(jobs, default=None)


def read_job(root: Path) -> str | None:
    """Return the job id of a checkpoint directory, None if nobody has used it yet; raises CheckpointError."""
    if (root / layout.JOB_FILE).exists():
        return open_directory(root)
    return _job_of_saves(root)


def find(root: Path) -> list[SaveRecord]:
    """Return the saves in a checkpoint directory, newest first; an unreadable folder spoils no other."""
    records = [
        look_at(root, step, kind, rank) for step, names in listed(root).items() for kind, rank in names
    ]
    return sorted(records, key=lambda record: (-record.step, record.kind, record.rank))


def listed(root: Path) -> dict[int, list[tuple[layout.Kind, int]]]:
    """Return by step, newest first, for whom there are folders of saves; nothing in those is looked at."""
    found: dict[int, list[tuple[layout.Kind, int]]] = {}
    for folder in reversed(_names(root)):
        step = layout.parse_step_folder(folder)
        if step is not None:
            found[step] = [parsed for _, parsed in _named(_names(root / folder))]
    return found


def look_at(root: Path, step: int, kind: layout.Kind, rank: int) -> SaveRecord:
    """Return one save; if it is not there, it is a record of one that was never finished."""
    path = root / layout.step_folder(step) / layout.rank_folder(kind, rank)
    replaced = path.with_name(REPLACED + path.name)
    return _record(path if path.exists() or not replaced.exists() else replaced, step, kind, rank)


def verify(
    record: SaveRecord, *, checksums: bool = True, on_read: Callable[[int], object] | None = None
) -> str | None:
    """Read every byte of a save; return why it is not whole, None if it is.

    checksums: False to look at the files' sizes only. on_read: told of each piece's size.
    """
    if record.metadata is None:
        return record.problem
    for file in record.metadata.files:
        path = record.path / file.name
        try:
            size = path.stat().st_size
            if size != file.size:
                return f"{path} has {size} bytes instead of {file.size}: it was cut or changed."
            if checksums and checksum(path, on_read) != file.checksum:
                return f"{path} is damaged: its checksum is not the one in {layout.METADATA_FILE}."
        except OSError as error:
            return f"{path} can't be read: {error.strerror}."
    return None


def read(record: SaveRecord) -> SavedState:
    """Read the state that jitckpt itself wrote into a save; SaveError if it can't be understood."""
    files = layout.state_files(record.metadata.saver if record.metadata else "builtin")
    path = record.path / files.document
    try:
        document = layout.parse_object(regular_file.content_of(path), str(path))
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error.strerror}.") from error
    return SavedState(document, tensor_file.read(record.path / files.tensors))


class KeptSaves:
    """Removes saves that are too old; remembers what it has seen, so that each save is read once."""

    def __init__(self, root: Path, identity: Identity) -> None:
        self._root, self._identity = root, identity
        self._whole: set[int] = set()  # steps that were whole when they were looked at

    def remove_old(self, keep: int) -> None:
        """Remove all saves older than the newest `keep` steps that are whole for every shard of the job.

        Raises starts.Superseded if the job has gone on without this process.
        """
        steps = sorted(_steps(self._root), reverse=True)
        self._whole &= set(steps)
        left = keep
        for step in steps:
            left -= self._is_whole(step)
            if left == 0:
                remove_before(self._root, step, self._identity)
                return

    def forget(self, step: int) -> None:
        """A save of this step is removed."""
        self._whole.discard(step)

    def _is_whole(self, step: int) -> bool:
        if step in self._whole:
            return True
        folder = self._root / layout.step_folder(step)
        shards = set()
        for path, (kind, rank) in _saves_in(folder):
            metadata = _record(path, step, kind, rank).metadata if kind == "rank" else None
            if metadata is not None and _is_of(metadata.identity, self._identity):
                shards.add(metadata.identity.shard)
        if len(shards) < self._identity.shards:
            return False
        try:
            sync_folder(folder)  # others may have been about to do it
            sync_folder(self._root)
        except OSError:  # then it can't be relied on
            return False
        self._whole.add(step)
        return True


def remove_before(root: Path, step: int, identity: Identity) -> None:
    """Remove the job's saves older than `step`; for when `step` is known to be whole for every shard.

    What jitckpt has not written stays, as do saves of other jobs. Raises starts.Superseded if the job has
    gone on without this process.
    """
    for old in _steps(root):
        folder = root / layout.step_folder(old)
        if old >= step or not _is_step_of(folder, old, identity):
            continue
        with _explained(folder):
            starts.check(root, identity.start)
        # Every rank may do this at the same time: what is gone already is well.
        for path in _children(folder):
            if _OURS.fullmatch(path.name):
                remove(path)
            elif _ERROR.fullmatch(path.name) or path.name == layout.WHOLE_NOTE:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            folder.rmdir()


def _is_step_of(folder: Path, step: int, identity: Identity) -> bool:
    """Return whether the saves of a step are of this job, by the first one that says whose it is."""
    records = (_record(path, step, *parsed) for path, parsed in _saves_in(folder))
    known = next((record.metadata for record in records if record.metadata), None)
    return known is None or _is_of(known.identity, identity)


def _is_of(found: Identity, identity: Identity) -> bool:
    return (found.job, found.world_size) == (identity.job, identity.world_size)


def remove(save: Path) -> None:
    """Remove one save; what makes it one goes first."""
    with suppress(OSError):
        (save / layout.METADATA_FILE).unlink(missing_ok=True)
    shutil.rmtree(save, ignore_errors=True)


def clear_leftovers(root: Path, rank: int) -> None:
    """Remove what killed processes have left of the writing of this rank's saves; nobody writes them now."""
    for step in _steps(root):
        folder = root / layout.step_folder(step)
        whole = {path for path, _ in _saves_in(folder)}
        for path in _children(folder):
            found = _OURS.fullmatch(path.name)
            parsed = layout.parse_rank_folder(found[2]) if found else None
            if parsed and parsed[1] == rank and path not in whole and "set-aside" not in path.name:
                shutil.rmtree(path, ignore_errors=True)


def set_aside_after(root: Path, step: int, rank: int, start: int = 0, ranks: int = 0) -> None:
    """Rename what `rank` saved of later steps: the job goes on from `step` and will come to those steps anew.

    They are incomplete (else one of them would have been taken) and must not be mixed with what comes.
    start: this one's number. ranks: of the job, which has had more before: one of them looks after each that
    there is no more. Raises starts.Superseded if the job has gone on without this process.
    """
    with _explained(root):
        starts.check(root, start)
    clear_leftovers(root, rank)
    for later in _steps(root):
        folder = root / layout.step_folder(later)
        if later <= step:
            continue
        for path, (kind, of_rank) in _saves_in(folder):
            if of_rank == rank or (0 < ranks <= of_rank and of_rank % ranks == rank):
                aside = folder / f"set-aside-{layout.rank_folder(kind, of_rank)}"
                with _explained(path):
                    starts.check(root, start)
                    if aside.exists():
                        shutil.rmtree(aside)
                    path.rename(aside)
                    sync_folder(folder)


def checksum(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Return the xxh3_128 of a file in hexadecimal."""
    digest = xxhash.xxh3_128()
    with regular_file.reading(path) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            if on_read is not None:
                on_read(len(data))
    return digest.hexdigest()


def write_by_rename(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one moment: a reader, or a crash, finds the old file or the new one."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with HashedFile(fresh) as file:
            file.write(data)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def _steps(root: Path) -> list[int]:
    """Return the steps that have a folder, in order."""
    return [step for path in _children(root) if (step := layout.parse_step_folder(path.name)) is not None]


def _saves_in(step_path: Path) -> Iterable[tuple[Path, tuple[layout.Kind, int]]]:
    """Yield the saves of a step; one that was about to be replaced stands in for a newer that is missing."""
    for folder, parsed in _named(_names(step_path)):
        yield step_path / folder, parsed


def _named(folders: Sequence[str]) -> Iterator[tuple[str, tuple[layout.Kind, int]]]:
    """Yield the folders of a step that are saves, and whose; only their names are looked at."""
    all_of_them = set(folders)
    for folder in folders:
        name = folder.removeprefix(REPLACED)
        parsed = layout.parse_rank_folder(name)
        if parsed is not None and (name == folder or name not in all_of_them):
            yield folder, parsed


def _record(path: Path, step: int, kind: layout.Kind, rank: int) -> SaveRecord:
    def unusable(problem: str, finished: bool = True) -> SaveRecord:
        return SaveRecord(path, step, kind, rank, None, problem, finished)

    try:
        metadata = layout.parse_metadata(regular_file.content_of(path / layout.METADATA_FILE))
    except FileNotFoundError:
        return unusable(f"{path} has no {layout.METADATA_FILE}: it was never finished.", finished=False)
    except OSError as error:
        return unusable(f"{path} can't be read: {error.strerror}.")
    except SaveError as error:
        return unusable(f"{path}: {error}")
    if (metadata.step, metadata.kind, metadata.identity.rank) != (step, kind, rank):
        found = f"step {metadata.step}, {metadata.kind} {metadata.identity.rank}"
        return unusable(f"{path} was moved: its metadata is that of {found}.")
    if metadata.identity.start and (problem := _passed_by(path.parents[1], metadata)):
        # It counts no more than if it had never been finished.
        return unusable(f"{path} {problem}.", finished=False)
    return SaveRecord(path, step, kind, rank, metadata, was_whole=(path.parent / layout.WHOLE_NOTE).exists())


def note_whole(root: Path, step: int) -> None:
    """Note, where a step is saved, that all shards of it are. Raises OSError."""
    folder = root / layout.step_folder(step)
    if folder.exists():
        (folder / layout.WHOLE_NOTE).touch()


def _passed_by(root: Path, metadata: Metadata) -> str | None:
    """Return why a save is not of the job as it went on, None if it is."""
    try:
        return starts.read(root).problem(metadata.identity.start, metadata.step)
    except OSError as error:
        raise CheckpointError(_sentence(error, root / starts.FOLDER)) from error


def _children(path: Path) -> list[Path]:
    return [path / name for name in _names(path)]


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(_sentence(error, path)) from error


def _sync(path: Path) -> None:
    handle = regular_file.open_regular(path)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except JitckptError:
        raise
    except OSError as error:
        raise SaveError(_sentence(error, path)) from error


_ADVICE = {
    errno.ENOSPC: "free some space or choose another checkpoint directory",
    errno.EDQUOT: "free some of your quota or choose another checkpoint directory",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "choose a checkpoint directory that can be written",
    errno.EACCES: "give yourself the permission to write there or choose another checkpoint directory",
    errno.EPERM: "give yourself the permission to write there or choose another checkpoint directory",
    errno.ENOTDIR: "choose a checkpoint directory whose path is not a file",
    errno.EEXIST: "choose a checkpoint directory whose path is not a file",
}


def _sentence(error: OSError, path: Path) -> str:
    advice = _ADVICE.get(error.errno or 0, "check the file system")
    return f"{error.filename or path} can't be written or read: {error.strerror or error}; {advice}."


def _note_on(error: BaseException | None) -> Any:
    def note(_function: Any, path: str, failure: Any) -> None:
        if error is not None:
            error.add_note(f"{path} could not be removed either: {failure[1]}.")

    return note
