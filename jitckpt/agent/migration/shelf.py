"""The snapshots of a job in its checkpoint directory: each whole or not there, for its user alone.

A snapshot is a folder of images and a plan, which has the digests of all of them and of itself. It is written
under another name, and gets its own once all of it is on the disk; only then the one before it goes.
"""

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from jitckpt.agent.migration.image_folder import PIECE
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.decisions.transparent.whose import why_not
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


def left(directory: Path) -> list[Snapshot]:
    """Return those that have their names, as a launcher has left them, the oldest first."""
    found = ((path, path.name.removeprefix(PREFIX)) for path in directory.glob(f"{PREFIX}*"))
    return sorted(
        (Snapshot(path, int(step)) for path, step in found if step.isdigit()), key=lambda one: one.step
    )


class Shelf:
    """Of one launcher, over all starts of its ranks. A snapshot is put there by a thread of its own.

    mark: by which all processes of the job are found, those that come from a snapshot too.
    """

    def __init__(self, directory: Path, whose: Mapping[str, Any]) -> None:
        """whose: what it is of, as decisions/transparent/whose.py has it."""
        self._directory, self._whose = directory, whose
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._comes = 0
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._whole: list[Snapshot] = []  # the oldest first
        self._refused: list[tuple[Snapshot, str]] = []
        self._sort_out()
        self._remove_unfinished()

    def _sort_out(self) -> None:
        """Find what a lost launcher of this very job has left; the rest stays until there is another."""
        for snapshot in left(self._directory):
            try:
                plan = told_of(snapshot)
                why = why_not(plan["whose"], self._whose)
            except DamagedSnapshot as error:
                self._refused.append((snapshot, str(error)))
            except (KeyError, TypeError, AttributeError):
                self._refused.append((snapshot, "It is of another version of jitckpt."))
            else:
                if why:
                    self._refused.append((snapshot, f"It is {why}."))
                else:
                    self._whole.append(snapshot)
                    self.mark = plan["mark"]

    @property
    def refused(self) -> list[tuple[Snapshot, str]]:
        """Those that were there and are not this job's, or damaged, each with a sentence."""
        return list(self._refused)

    @property
    def newest(self) -> Snapshot | None:
        """The newest that is whole."""
        with self._lock:
            return self._whole[-1] if self._whole else None

    @property
    def step(self) -> int | None:
        """The step of the newest, also if it is still being made whole; None if there is none."""
        if self.is_busy:
            return self._comes
        return None if (newest := self.newest) is None else newest.step

    def begin(self, step: int, *, in_memory: bool) -> "Draft":
        """Return a folder for a new one. Raises OSError."""
        path = self._directory / f"{UNFINISHED}{step:010}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(0o700, parents=True)
        return Draft(path, step, in_memory=in_memory)

    def put(
        self, draft: "Draft", plan: Mapping[str, Any], done: Callable[[int, OSError | None], None]
    ) -> None:
        """Have a draft made whole on another thread; at its end call `done` with the bytes, or the error."""

        def work() -> None:
            size, error = 0, None
            own = {"whose": self._whose, "mark": self.mark, "made": time.time()}
            try:
                size = draft.finish({**plan, **own})
                path = self._directory / f"{PREFIX}{draft.step:010}"
                shutil.rmtree(path, ignore_errors=True)
                draft.path.rename(path)
                _sync(self._directory)
                with self._lock:
                    self._whole = [Snapshot(path, draft.step)]
                self._remove(keep=[path])
            except OSError as failed:
                draft.drop()
                error = failed
            done(size, error)

        self._comes = draft.step
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

    def pass_over(self, snapshot: Snapshot) -> None:
        """It is of no use now: it stays until there is a newer one."""
        with self._lock:
            self._whole.remove(snapshot)

    def forget(self) -> None:
        """None is of any use any more, also of those that were not taken."""
        with self._lock:
            self._whole = []
        self._remove(keep=[])

    def _remove(self, keep: Collection[Path]) -> None:
        for snapshot in left(self._directory):
            if snapshot.path not in keep:
                shutil.rmtree(snapshot.path, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for path in self._directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


class Draft:
    """A snapshot that is being made."""

    def __init__(self, path: Path, step: int, *, in_memory: bool) -> None:
        """in_memory: images are written there first, so that nobody who is held waits for the disk."""
        self.path, self.step = path, step
        self._in_memory = in_memory
        self._folders: dict[int, int] = {}
        self._memory = contextlib.ExitStack()

    def of(self, rank: int) -> int:
        """Return a descriptor of the folder of the rank's images, while this is there. Raises OSError."""
        if rank not in self._folders:
            (self.path / f"rank-{rank}").mkdir(0o700)
            if self._in_memory:
                self._folders[rank] = self._memory.enter_context(nameless_folder())
            else:
                self._folders[rank] = folder_of(self.path, rank)
                self._memory.callback(os.close, self._folders[rank])
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
            own = digests[str(rank)] = {}
            for name in sorted(os.listdir(folder)):
                if not name.endswith(".log"):
                    to = self.path / f"rank-{rank}" / name
                    own[name], bytes_of_file = _digest(folder, name, to if self._in_memory else None)
                    size += bytes_of_file
                    _sync(to)
                if self._in_memory:
                    os.unlink(name, dir_fd=folder)
            _sync(self.path / f"rank-{rank}")
        body = json.dumps({**plan, "digests": digests})
        file = self.path / PLAN
        file.write_text(json.dumps({"digest": xxhash.xxh3_128_hexdigest(body.encode()), "plan": body}))
        _sync(file)
        _sync(self.path)
        self._memory.close()
        return size

    def drop(self) -> None:
        """Take all away."""
        self._memory.close()
        shutil.rmtree(self.path, ignore_errors=True)


def told_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the plan of a snapshot, which is as it was written. Raises DamagedSnapshot."""
    try:
        told = json.loads((snapshot.path / PLAN).read_text())
        body = str(told["plan"])
        if xxhash.xxh3_128_hexdigest(body.encode()) != told["digest"]:
            raise DamagedSnapshot(f"{snapshot.path / PLAN} is not what was written.")
        plan: dict[str, Any] = json.loads(body)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedSnapshot(f"{snapshot.path} can't be read: {error}.") from error
    return plan


def plan_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the plan of a snapshot all of whose bytes are as they were written. Raises DamagedSnapshot."""
    plan = told_of(snapshot)
    try:
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


def folder_of(path: Path, rank: int) -> int:
    """Return a descriptor of a rank's folder in a snapshot. Raises OSError."""
    return os.open(path / f"rank-{rank}", OPEN)


def _digest(folder: int, name: str, to: Path | None = None) -> tuple[str, int]:
    """Return digest and size of a file, which is copied on the way if `to` is given. Raises OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb"))
        copy = None if to is None else stack.enter_context(open(to, "wb"))
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
            if copy is not None:
                copy.write(piece)
    return digest.hexdigest(), size


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
