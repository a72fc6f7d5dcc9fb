"""Saves on the disk: write one whole or not at all, find what is there, check, read and remove it."""

import ctypes
import errno
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash
from torch import Tensor

from jitckpt import layout, tensor_file
from jitckpt.errors import CheckpointError, JitckptError, SaveError
from jitckpt.layout import FileEntry, Identity, Metadata
from jitckpt.staging import Staging
from jitckpt.tree_codec import Json

READ_BYTES = 4 << 20
PIECE_BYTES = 1 << 20  # that a processor's cache holds
_committing = threading.Lock()  # a save takes the place of another in two renames


@dataclass(frozen=True)
class SaveRecord:
    """A save's folder as it was found: with its metadata, or with the sentence why that can't be used.

    `finished`: it has a metadata file, which is written last.
    """

    path: Path
    step: int
    kind: layout.Kind
    rank: int
    metadata: Metadata | None
    problem: str | None = None
    finished: bool = True


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
    ) -> None:
        """by: who writes it, where this process may write the same save twice at a time."""
        self._root, self._identity, self._step, self._kind, self._saver = root, identity, step, kind, saver
        self._place = root / layout.step_folder(step) / layout.rank_folder(kind, identity.rank)
        self.path = self._place.with_name("-".join(filter(None, ("unfinished", by, self._place.name))))
        self._files: list[FileEntry] = []

    def __enter__(self) -> Self:
        with _explained(self.path):
            if self.path.exists():
                shutil.rmtree(self.path)  # left by a process that was killed
            self.path.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists():
            shutil.rmtree(self.path, onerror=_note_on(error))

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor], staging: Staging | None = None) -> None:
        """Write a safetensors file, through these host buffers if they are given."""
        with _explained(self.path / name), HashedFile(self.path / name) as file:
            tensor_file.write(file.append, tensors, staging, file.show)
        self._files.append(FileEntry(name, file.size, file.checksum))

    def add_json(self, name: str, content: Json) -> None:
        """Write a JSON file."""
        with _explained(self.path / name), HashedFile(self.path / name) as file:
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
                    _sync(path)
                elif name not in known:
                    _sync(path)
                    self._files.append(FileEntry(name, path.stat().st_size, checksum(path)))

    def commit(self) -> tuple[Path, int]:
        """Make the save whole; returns its folder and the bytes written in all.

        Another host may write the same local state into a directory that all share: then the first stays.
        """
        metadata = Metadata(
            self._identity, self._kind, self._saver, self._step, time.time(), tuple(self._files)
        ).to_json()
        with _explained(self.path), _committing:
            write_by_rename(self.path / layout.METADATA_FILE, metadata)
            replaced = self.path.with_name(f"replaced-{self._place.name}")
            if self._place.exists():
                self._place.rename(replaced)
            try:
                self.path.rename(self._place)
            except OSError as error:
                if self._kind != "local" or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if replaced.exists():
                shutil.rmtree(replaced)
            _sync(self._place.parent)
            _sync(self._root)
        return self._place, len(metadata) + sum(file.size for file in self._files)


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
            _begin_sync(self._file.fileno(), begin, len(piece))

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

    job: the id that it gets if it has none yet; by default a new one.
    Raises CheckpointError if it can't be written or its job.json is damaged.
    """
    path = root / layout.JOB_FILE
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            fresh = root / f".{layout.JOB_FILE}.{uuid.uuid4().hex}"
            try:
                with HashedFile(fresh) as file:
                    file.write(json.dumps({"format": layout.FORMAT, "job": job or uuid.uuid4().hex}).encode())
                os.link(fresh, path)  # unlike a rename it never replaces another rank's
            except FileExistsError:
                pass  # another rank was first: its id is read below
            finally:
                fresh.unlink(missing_ok=True)
        job = layout.parse_object(path.read_bytes(), str(path)).get("job")
    except OSError as error:
        raise CheckpointError(_sentence(error, root)) from error
    except SaveError as error:
        raise CheckpointError(f"{error} Put it back, or choose another checkpoint directory.") from error
    if not isinstance(job, str) or not job:
        raise CheckpointError(f"{path} has no job id. Put it back, or choose another checkpoint directory.")
    return job


def read_job(root: Path) -> str | None:
    """Return the job id of a checkpoint directory, None if nobody has used it yet; raises CheckpointError."""
    return open_directory(root) if (root / layout.JOB_FILE).exists() else None


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
            names = map(layout.parse_rank_folder, _names(root / folder))
            found[step] = [name for name in names if name is not None]
    return found


def look_at(root: Path, step: int, kind: layout.Kind, rank: int) -> SaveRecord:
    """Return one save; if it is not there, it is a record of one that was never finished."""
    return _record(root / layout.step_folder(step) / layout.rank_folder(kind, rank), step, kind, rank)


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
        document = layout.parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error.strerror}.") from error
    return SavedState(document, tensor_file.read(record.path / files.tensors))


def remove_old(root: Path, identity: Identity, keep: int) -> None:
    """Remove all saves older than the newest `keep` steps that are whole for every shard of the job."""
    steps: dict[int, set[int]] = {}
    for record in find(root):
        if record.kind != "rank" or record.metadata is None:
            continue
        found = record.metadata.identity
        if (found.job, found.world_size) != (identity.job, identity.world_size):
            return  # what is not ours is not ours to remove
        steps.setdefault(record.step, set()).add(found.shard)
    whole = sorted(step for step, shards in steps.items() if len(shards) == identity.shards)
    if len(whole) >= keep:
        remove_before(root, whole[-keep])


def remove_before(root: Path, step: int) -> None:
    """Remove all saves older than `step`; for when `step` is known to be whole for every shard."""
    for path in _children(root):
        found = layout.parse_step_folder(path.name)
        if found is not None and found < step:
            # Every rank may do this at the same time: what is gone already is well.
            shutil.rmtree(path, ignore_errors=True)


def remove(save: Path) -> None:
    """Remove one save; what makes it one goes first."""
    (save / layout.METADATA_FILE).unlink(missing_ok=True)
    shutil.rmtree(save, ignore_errors=True)


def set_aside_after(root: Path, step: int, rank: int) -> None:
    """Rename what `rank` saved of later steps: the job goes on from `step` and will come to those steps anew.

    They are incomplete (else one of them would have been taken) and must not be mixed with what comes.
    """
    for step_path in _children(root):
        found = layout.parse_step_folder(step_path.name)
        if found is None or found <= step:
            continue
        for path in _children(step_path):
            parsed = layout.parse_rank_folder(path.name)
            if parsed is not None and parsed[1] == rank:
                aside = path.with_name(f"set-aside-{path.name}")
                with _explained(path):
                    if aside.exists():
                        shutil.rmtree(aside)
                    path.rename(aside)


def checksum(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Return the xxh3_128 of a file in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
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
    _sync(path.parent)


def _record(path: Path, step: int, kind: layout.Kind, rank: int) -> SaveRecord:
    def unusable(problem: str, finished: bool = True) -> SaveRecord:
        return SaveRecord(path, step, kind, rank, None, problem, finished)

    try:
        metadata = layout.parse_metadata((path / layout.METADATA_FILE).read_bytes())
    except FileNotFoundError:
        return unusable(f"{path} has no {layout.METADATA_FILE}: it was never finished.", finished=False)
    except OSError as error:
        return unusable(f"{path} can't be read: {error.strerror}.")
    except SaveError as error:
        return unusable(f"{path}: {error}")
    if (metadata.step, metadata.kind, metadata.identity.rank) != (step, kind, rank):
        found = f"step {metadata.step}, {metadata.kind} {metadata.identity.rank}"
        return unusable(f"{path} was moved: its metadata is that of {found}.")
    return SaveRecord(path, step, kind, rank, metadata)


def _children(path: Path) -> list[Path]:
    return [path / name for name in _names(path)]


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(_sentence(error, path)) from error


_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2


def _begin_sync(descriptor: int, begin: int, size: int) -> None:
    # Only sooner, so what it returns does not matter: fsync comes, waits for all, and tells of every error.
    _libc.sync_file_range(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
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
