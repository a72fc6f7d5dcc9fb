"""A host's part of a snapshot as files that go to another host, and as they come there: whole, or not at all.

Pages that an older part has as well are there already, and don't come again.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from jitckpt.agent.migration.pages import BLOCK, FILE, read_index
from jitckpt.agent.migration.shelf import (
    INDEX,
    PAGES,
    UNFINISHED,
    DamagedSnapshot,
    ProcessSnapshot,
    check,
    snapshot_path,
    sync,
)
from jitckpt.console import show_size
from jitckpt.decisions.transparent import suspension
from jitckpt.wire.moves import ImageFile
from jitckpt.wire.visits import OF_ALL, PLAN, PartFile


def files_of(snapshot: ProcessSnapshot) -> list[PartFile]:
    """Return all files of a part, the plan last. Raises OSError."""
    found = []
    numbers: set[int] = set()
    for folder in sorted(snapshot.path.glob("rank-*")):
        rank = int(folder.name.removeprefix("rank-"))
        found += [_file(rank, path) for path in sorted(folder.iterdir())]
        for path in folder.glob(f"*{INDEX}"):
            numbers |= {place >> FILE for place in read_index(path)}
    pages = snapshot.path.parent / PAGES
    found += [_file(OF_ALL, pages / str(number)) for number in sorted(numbers)]
    return [*found, _file(OF_ALL, snapshot.path / PLAN)]


def opened(snapshot: ProcessSnapshot, file: PartFile) -> int:
    """Return a descriptor to read a file of a part. Raises OSError."""
    return os.open(_path(snapshot.path, file.rank, file.image), os.O_RDONLY | os.O_CLOEXEC)


def _file(rank: int, path: Path) -> PartFile:
    status = path.stat()
    return PartFile(rank, path.name, status.st_size, status.st_blocks * BLOCK)


def _path(snapshot: Path, rank: int, image: str) -> Path:
    if rank != OF_ALL:
        return snapshot / f"rank-{rank}" / image
    return snapshot / PLAN if image == PLAN else snapshot.parent / PAGES / image


class ComingPart:
    """A part that is to be `files` in a folder, where there may be older ones."""

    def __init__(self, folder: Path, step: int, name: str, files: Sequence[PartFile]) -> None:
        self._folder, self._step, self._name, self._files = folder, step, name, files
        self._path = folder / f"{UNFINISHED}{step:010}"
        self._has: set[str] = set()
        self._new: list[Path] = []
        self._lock = threading.Lock()  # who is cancelled may drop it before another thread has finished it
        self._is_dropped = False

    @property
    def lacking(self) -> list[PartFile]:
        """Return what has to come."""
        return [one for one in self._files if not (one.is_pages and one.image in self._has)]

    def begin(self, reserve: int = 0) -> None:
        """See what is there, and make the folders. Raises OSError, also where there is no room.

        reserve: bytes that have to be left free.
        """
        pages = self._folder / PAGES
        pages.mkdir(0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        self._has = {one.image for one in self._files if one.is_pages and _has(pages / one.image, one.size)}
        status = os.statvfs(self._folder)
        free, needed = status.f_bavail * status.f_frsize, sum(one.bytes for one in self.lacking)
        if suspension.lacks_room(needed + reserve, free):
            beside = f", and {show_size(reserve)} of its own next snapshot" if reserve else ""
            raise OSError(f"there is no room for {show_size(needed)}{beside}: {show_size(free)} are free")
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(0o700)
        for rank in {one.rank for one in self._files} - {OF_ALL}:
            (self._path / f"rank-{rank}").mkdir(0o700)

    def opened(self, said: ImageFile) -> int | None:
        """Return a descriptor for a file that is to come; None for any other. Raises OSError."""
        sizes = {(one.rank, one.image): one.size for one in self.lacking}
        if sizes.get((said.rank, said.image)) != said.size:
            return None
        path = _path(self._path, said.rank, said.image)
        path.unlink(missing_ok=True)  # of an older one
        self._new.append(path)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def finish(self) -> ProcessSnapshot:
        """Give it its name, once all of its bytes are right and on the disk.

        Raises DamagedSnapshot or OSError.
        """
        with self._lock:
            if self._is_dropped:
                raise OSError(f"{self._path} is given up")
            plan = check(ProcessSnapshot(self._path, self._step, self._name))
            if (plan.get("step"), plan.get("name")) != (self._step, self._name):
                raise DamagedSnapshot(f"{self._path / PLAN} is of another snapshot.")
            for path in (*self._new, *{one.parent for one in self._new}):
                sync(path)
            whole = snapshot_path(self._folder, self._step)
            shutil.rmtree(whole, ignore_errors=True)
            self._path.rename(whole)
            sync(self._folder)
            return ProcessSnapshot(whole, self._step, self._name)

    def drop(self) -> None:
        """Take away what has come, unless it has its name by now."""
        with self._lock:
            self._is_dropped = True
            if not self._path.exists():
                return
            for path in self._new:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            shutil.rmtree(self._path, ignore_errors=True)


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
