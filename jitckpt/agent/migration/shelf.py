"""The snapshots of a job in its checkpoint directory: each whole or not there, for its user alone.

A snapshot is a folder of images and a plan, which has the digests of all of them and of itself. It is written
under another name, and gets its own once all of it is on the disk; only then the one before it goes.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from jitckpt.agent.migration.image_folder import PIECE
from jitckpt.errors import JitckptError
from jitckpt.system.left_folders import OPEN

PREFIX, UNFINISHED = "snapshot-", "unfinished-snapshot-"
PLAN = "plan.json"


class DamagedSnapshot(JitckptError):
    """A snapshot is not what was written; the text is a sentence."""


@dataclass(frozen=True)
class Snapshot:
    """A whole one."""

    path: Path
    step: int


class Shelf:
    """Of one launcher, over all starts of its ranks. A snapshot is put there by a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._newest: Snapshot | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._remove(keep=None)  # those of a launcher that has ended: the processes that they need are gone

    @property
    def newest(self) -> Snapshot | None:
        """The newest that is whole."""
        with self._lock:
            return self._newest

    def begin(self, step: int) -> "Draft":
        """Return a folder for a new one. Raises OSError."""
        path = self._directory / f"{UNFINISHED}{step:010}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(0o700, parents=True)
        return Draft(path, step)

    def put(
        self, draft: "Draft", plan: Mapping[str, Any], done: Callable[[int, OSError | None], None]
    ) -> None:
        """Have a draft made whole on another thread; at its end call `done` with the bytes, or the error."""

        def work() -> None:
            size, error = 0, None
            try:
                size = draft.finish(plan)
                path = self._directory / f"{PREFIX}{draft.step:010}"
                shutil.rmtree(path, ignore_errors=True)
                draft.path.rename(path)
                _sync(self._directory)
                with self._lock:
                    self._newest = Snapshot(path, draft.step)
                self._remove(keep=path)
            except OSError as failed:
                draft.drop()
                error = failed
            done(size, error)

        self._thread = threading.Thread(target=work, name="jitckpt-snapshot", daemon=True)
        self._thread.start()

    @property
    def free(self) -> int:
        """How many bytes there is room for. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    @property
    def is_busy(self) -> bool:
        """Whether one is being made whole."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> None:
        """Wait until none is."""
        if self._thread is not None:
            self._thread.join()

    def forget(self) -> None:
        """The newest is of no use."""
        with self._lock:
            self._newest = None
        self._remove(keep=None)

    def _remove(self, keep: Path | None) -> None:
        for prefix in (PREFIX, UNFINISHED):
            for path in self._directory.glob(f"{prefix}*"):
                if path != keep:
                    shutil.rmtree(path, ignore_errors=True)


class Draft:
    """A snapshot that is being made."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step
        self._folders: dict[int, int] = {}

    def of(self, rank: int) -> int:
        """Return a descriptor of the rank's own folder, while this is there. Raises OSError."""
        if rank not in self._folders:
            self._folders[rank] = folder_of(self.path, rank, make=True)
        return self._folders[rank]

    def again(self, rank: int) -> None:
        """The rank's images were of no use: they are made anew."""
        for name in os.listdir(self.of(rank)):
            os.unlink(name, dir_fd=self.of(rank))

    def finish(self, plan: Mapping[str, Any]) -> int:
        """Put all on the disk, and the plan last; return the bytes. Raises OSError."""
        size = 0
        digests: dict[str, dict[str, str]] = {}
        for rank, folder in self._folders.items():
            digests[str(rank)] = {}
            for name in sorted(os.listdir(folder)):
                if name.endswith(".log"):
                    os.unlink(name, dir_fd=folder)
                    continue
                digests[str(rank)][name], bytes_of_file = _digest(folder, name, sync=True)
                size += bytes_of_file
            os.fsync(folder)
        body = json.dumps({**plan, "digests": digests})
        file = self.path / PLAN
        file.write_text(json.dumps({"digest": xxhash.xxh3_128_hexdigest(body.encode()), "plan": body}))
        _sync(file)
        _sync(self.path)
        self._close()
        return size

    def drop(self) -> None:
        """Take all away."""
        self._close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _close(self) -> None:
        for folder in self._folders.values():
            os.close(folder)
        self._folders.clear()


def plan_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the plan of a snapshot all of whose bytes are as they were written. Raises DamagedSnapshot."""
    try:
        told = json.loads((snapshot.path / PLAN).read_text())
        body = str(told["plan"])
        if xxhash.xxh3_128_hexdigest(body.encode()) != told["digest"]:
            raise DamagedSnapshot(f"{snapshot.path / PLAN} is not what was written.")
        plan: dict[str, Any] = json.loads(body)
        for rank, digests in plan["digests"].items():
            folder = folder_of(snapshot.path, int(rank))
            try:
                for name, digest in digests.items():
                    if _digest(folder, name)[0] != digest:
                        path = snapshot.path / f"rank-{rank}" / name
                        raise DamagedSnapshot(f"{path} is not what was written.")
            finally:
                os.close(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedSnapshot(f"{snapshot.path} can't be read: {error}.") from error
    return plan


def folder_of(path: Path, rank: int, *, make: bool = False) -> int:
    """Return a descriptor of a rank's folder in a snapshot. Raises OSError."""
    own = path / f"rank-{rank}"
    if make:
        own.mkdir(0o700)
    return os.open(own, OPEN)


def _digest(folder: int, name: str, *, sync: bool = False) -> tuple[str, int]:
    digest, size = xxhash.xxh3_128(), 0
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest(), size


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
