"""The snapshots of a job in its checkpoint directory: each whole or not there, for its user alone.

A snapshot is a folder of images and a plan, which has the digests of all of them and of itself. It is written
under another name, and gets its own once all of it is on the disk; only then an older one goes. Pages that
two have are there once (pages.py), if there was memory for the images.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import xxhash

from jitckpt.agent.migration import looked_at
from jitckpt.agent.migration.image_folder import PIECE
from jitckpt.agent.migration.pages import BLOCK, PAGE, Adding, Pages, pieces, read_index
from jitckpt.bindings.nameless_folder import nameless_folder
from jitckpt.decisions import copied_snapshots
from jitckpt.decisions.transparent.whose import why_not
from jitckpt.decisions.whole_snapshots import Named
from jitckpt.errors import JitckptError
from jitckpt.system.left_folders import OPEN
from jitckpt.wire.visits import PLAN

PREFIX, UNFINISHED = "snapshot-", "unfinished-snapshot-"
HOST = "host-"  # a folder in the job's directory, where it has several hosts
PAGES = "pages-of-snapshots"
INDEX = ".index"  # behind the name of an image of pages, for where these are
INDEX_BYTES = 8  # of it, for a page
ROOM = 3  # times the images, that are free where they are put together in memory
KEPT = 2  # whole ones, where the pages that both have are there once


class DamagedSnapshot(JitckptError):
    """A snapshot is not what was written; the text is a sentence."""


@dataclass(frozen=True)
class ProcessSnapshot:
    """A whole one. name: that all hosts have for it. holders: who has a copy of it, where it is not here."""

    path: Path
    step: int
    name: str = ""
    holders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Size:
    """In bytes. images: of a snapshot's files. stored: what was new of that. disk: of all snapshots."""

    images: int
    stored: int
    disk: int


def left(directory: Path) -> list[ProcessSnapshot]:
    """Return those that have their names, as a launcher has left them, the oldest first."""
    found = ((path, path.name.removeprefix(PREFIX)) for path in directory.glob(f"{PREFIX}*"))
    return sorted(
        (ProcessSnapshot(path, int(step)) for path, step in found if step.isdigit()), key=lambda one: one.step
    )


def snapshot_path(directory: Path, step: int) -> Path:
    """Return where one that is whole is."""
    return directory / f"{PREFIX}{step:010}"


def of_hosts(directory: Path) -> list[Path]:
    """Return the folders that hosts of a job have in its directory."""
    return sorted(path for path in directory.glob(f"{HOST}*") if path.name.removeprefix(HOST).isdigit())


class Shelf:
    """Of one launcher, over all starts of its ranks. A snapshot is put there by a thread of its own.

    mark: by which all processes of the job are found, those that come from a snapshot too.
    """

    def __init__(self, directory: Path, whose: Mapping[str, Any], *, several: str = "") -> None:
        """whose: what it is of, as decisions/transparent/whose.py has it.

        several: the mark, where a job has several hosts: what was put is of use once all of them have it.
        """
        self.directory, self._whose, self._several = directory, whose, bool(several)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._comes = 0
        self.mark = several or f"{os.getpid()}-{secrets.token_hex(8)}"
        self._whole: list[ProcessSnapshot] = []  # the oldest first
        self._put: ProcessSnapshot | None = None  # that not all hosts are known to have
        self._stays = KEPT  # how many whole ones
        self._guarded: set[Named] = set()  # of which other hosts have copies
        self._copied: Named | None = None  # that is just being copied there
        self._refused: list[tuple[ProcessSnapshot, str]] = []
        self._pages = Pages(directory / PAGES)
        self._last: Path | None = None  # that was put
        self._sort_out()
        self._remove_unfinished()
        self._give_back()

    def _sort_out(self) -> None:
        """Find what a lost launcher of this very job has left; the rest stays until there is another."""
        for snapshot in left(self.directory):
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
                    self._whole.append(replace(snapshot, name=str(plan["name"])))
                    if not self._several:
                        self.mark = plan["mark"]

    @property
    def refused(self) -> list[tuple[ProcessSnapshot, str]]:
        """Those that were there and are not this job's, or damaged, each with a sentence."""
        return list(self._refused)

    @property
    def newest(self) -> ProcessSnapshot | None:
        """The newest that is whole."""
        with self._lock:
            return self._whole[-1] if self._whole else None

    @property
    def step(self) -> int | None:
        """The step of the newest, also if it is still being made whole; None if there is none."""
        if self.is_busy and not self._several:
            return self._comes
        return None if (newest := self.newest) is None else newest.step

    def begin(self, step: int, *, in_memory: bool) -> "Draft":
        """Return a folder for a new one. Raises OSError."""
        path = self.directory / f"{UNFINISHED}{step:010}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(0o700, parents=True)
        return Draft(path, step, in_memory=in_memory)

    def put(
        self, draft: "Draft", plan: Mapping[str, Any], done: Callable[[Size, OSError | None], None]
    ) -> None:
        """Have a draft made whole on another thread; at its end call `done` with its size, or the error."""

        def work() -> None:
            size, error = Size(0, 0, 0), None
            own = {"whose": self._whose, "mark": self.mark, "made": time.time()}
            self._last = path = snapshot_path(self.directory, draft.step)
            try:
                images, stored = draft.finish({**plan, **own}, self._pages)
                shutil.rmtree(path, ignore_errors=True)
                draft.path.rename(path)
                sync(self.directory)
                with self._lock:
                    self._put = ProcessSnapshot(path, draft.step, str(plan["name"]))
                    self._stays = KEPT if draft.in_memory else 1
                if not self._several:
                    self.all_have()
                size = Size(images, stored, self.bytes_on_disk)
            except OSError as failed:
                draft.drop()
                error = failed
            done(size, error)

        self._comes = draft.step
        self._thread = threading.Thread(target=work, name="jitckpt-snapshot", daemon=True)
        self._thread.start()

    def all_have(self) -> None:
        """What was put is whole on all hosts: the older ones go that nobody needs."""
        with self._lock:
            if self._put is None:
                return
            before = [one for one in self._whole if one.step != self._put.step]
            self._whole = [*before, self._put]
            self._put = None
        self._remove_older()

    def begin_copying(self, named: Named) -> ProcessSnapshot | None:
        """Return the snapshot, which stays until `end_copying`; None if it is gone."""
        with self._lock:
            self._copied = named
            return next((one for one in self._whole if (one.step, one.name) == named), None)

    def end_copying(self, named: Named, *, made: bool) -> None:
        """All hosts' parts of this one are on other hosts, or not all: older ones go that nobody needs."""
        with self._lock:
            self._copied = None
            if made:
                self._guarded.add(named)
        if not self.is_busy:  # it has files then that no snapshot has yet
            self._remove_older()

    def _remove_older(self) -> None:
        with self._lock:
            there = [(one.step, one.name) for one in self._whole]
            stay = copied_snapshots.kept(there, self._guarded, self._stays)
            self._whole = [
                one for one in self._whole if (named := (one.step, one.name)) in stay or named == self._copied
            ]
            kept = self._there()
        self._remove(keep=[one.path for one in kept])
        self._give_back()

    def not_all_have(self) -> None:
        """What was put is not whole on some host: it goes."""
        with self._lock:
            put, self._put = self._put, None
        if put is not None:
            shutil.rmtree(put.path, ignore_errors=True)
            self._give_back()

    def _give_back(self) -> None:
        """Give pages back to the disk that no snapshot has any more."""
        if self._last is not None and not self._last.exists():
            self._pages.forget()  # those that are known are its own, and go with it
        with contextlib.suppress(OSError):  # they can't be read, so nothing of them is given back
            self._pages.keep(self._indexes())

    @property
    def named(self) -> list[Named]:
        """Those that are whole here, each with its step and its name."""
        with self._lock:
            return [(one.step, one.name) for one in self._there() if not one.holders]

    def agree_on(
        self,
        common: Collection[Named],
        elsewhere: Mapping[Named, Sequence[int]] = MappingProxyType({}),
        guarded: Collection[Named] = (),
    ) -> None:
        """These are whole on all hosts; no other is of any use until there is a newer one.

        elsewhere: which hosts have copies of it, by what is lost here. guarded: all parts are on others, too.
        """
        with self._lock:
            there = {
                named: ProcessSnapshot(snapshot_path(self.directory, named[0]), *named, tuple(holders))
                for named, holders in elsewhere.items()
            }
            there |= {(one.step, one.name): one for one in self._there() if not one.holders}
            self._whole = [there[named] for named in sorted(common) if named in there]
            self._put, self._copied, self._guarded = None, None, set(guarded)

    def take_in(self, lost: ProcessSnapshot, fetched: ProcessSnapshot) -> None:
        """A part that was lost has come from another host. Raises DamagedSnapshot if it is of no use here."""
        try:
            why = why_not(told_of(fetched)["whose"], self._whose)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedSnapshot("It is of another version of jitckpt.") from error
        if why:
            raise DamagedSnapshot(f"It is {why}.")
        with self._lock:
            self._whole[self._whole.index(lost)] = fetched

    def forget_pages(self) -> None:
        """Some may be damaged: the next snapshot is stored as a whole."""
        self._pages.forget()

    @property
    def images(self) -> int:
        """The bytes of the images of the newest; 0 if they are not known."""
        sizes: dict[Path, int] = {}
        if (newest := self.newest) is not None:
            with contextlib.suppress(OSError):
                sizes = {path: path.stat().st_size for path in newest.path.glob("rank-*/*")}
        return sum(
            size // INDEX_BYTES * PAGE if path.suffix == INDEX else size for path, size in sizes.items()
        )

    def _there(self) -> list[ProcessSnapshot]:
        return [*self._whole, *([] if self._put is None else [self._put])]

    @property
    def free(self) -> int:
        """How many bytes there is room for. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize

    @property
    def bytes_on_disk(self) -> int:
        """What all take there. Raises OSError."""
        with self._lock:
            kept = [one.path for one in self._there()]
        return self._pages.bytes_on_disk + sum(map(_bytes_on_disk, kept))

    @property
    def is_busy(self) -> bool:
        """Whether one is being made whole."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> None:
        """Wait until none is."""
        if self._thread is not None:
            self._thread.join()

    def pass_over(self, snapshot: ProcessSnapshot) -> None:
        """It is of no use now: it stays until there is a newer one."""
        with self._lock:
            self._whole.remove(snapshot)
        self._pages.forget()  # one of those may be damaged

    def forget(self) -> None:
        """None is of any use any more, also of those that were not taken."""
        with self._lock:
            self._whole, self._put, self._copied = [], None, None
        self._remove(keep=[])
        self._pages.forget()
        self._pages.keep([])

    def _indexes(self) -> list[Path]:
        return [path for one in left(self.directory) for path in one.path.glob(f"rank-*/*{INDEX}")]

    def _remove(self, keep: Collection[Path]) -> None:
        for snapshot in left(self.directory):
            if snapshot.path not in keep:
                shutil.rmtree(snapshot.path, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


class Draft:
    """A snapshot that is being made."""

    def __init__(self, path: Path, step: int, *, in_memory: bool) -> None:
        """in_memory: images are written there first, so that nobody who is held waits for the disk."""
        self.path, self.step = path, step
        self.in_memory = in_memory
        self._folders: dict[int, int] = {}
        self._memory = contextlib.ExitStack()

    def of(self, rank: int) -> int:
        """Return a descriptor of the folder of the rank's images, while this is there. Raises OSError."""
        if rank not in self._folders:
            (self.path / f"rank-{rank}").mkdir(0o700)
            if self.in_memory:
                self._folders[rank] = self._memory.enter_context(nameless_folder())
            else:
                self._folders[rank] = folder_of(self.path, rank)
                self._memory.callback(os.close, self._folders[rank])
        return self._folders[rank]

    def again(self, rank: int) -> None:
        """The rank's images were of no use: they are made anew."""
        for name in os.listdir(self.of(rank)):
            os.unlink(name, dir_fd=self.of(rank))

    def finish(self, plan: Mapping[str, Any], pages: Pages) -> tuple[int, int]:
        """Put all on the disk, the plan last; return the bytes, and those that are new. Raises OSError."""
        size = stored = 0
        digests: dict[str, dict[str, str]] = {}
        adding = pages.begin() if self.in_memory else None
        try:
            for rank, folder in self._folders.items():
                own = digests[str(rank)] = {}
                for name in sorted(os.listdir(folder)):
                    if not name.endswith(".log"):
                        to = self.path / f"rank-{rank}" / name
                        bytes_of_file = os.stat(name, dir_fd=folder).st_size
                        size += bytes_of_file
                        if adding is not None and name.startswith("pages-") and bytes_of_file % PAGE == 0:
                            own[name] = _index(folder, name, adding, to.with_name(f"{name}{INDEX}"))
                        else:
                            own[name] = _digest(folder, name, to if self.in_memory else None)
                            sync(to)
                            stored += bytes_of_file
                    if self.in_memory:
                        os.unlink(name, dir_fd=folder)
                sync(self.path / f"rank-{rank}")
            if adding is not None:
                adding.finish()
                stored += adding.bytes
        except BaseException:
            if adding is not None:
                adding.drop()
            raise
        body = json.dumps({**plan, "digests": digests})
        file = self.path / PLAN
        file.write_text(json.dumps({"digest": xxhash.xxh3_128_hexdigest(body.encode()), "plan": body}))
        sync(file)
        sync(self.path)
        self._memory.close()
        if adding is not None:
            pages.taken(adding)
        return size, stored

    def drop(self) -> None:
        """Take all away."""
        self._memory.close()
        shutil.rmtree(self.path, ignore_errors=True)


def told_of(snapshot: ProcessSnapshot) -> dict[str, Any]:
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


def check(snapshot: ProcessSnapshot) -> dict[str, Any]:
    """Return the plan of a snapshot of which all bytes are as they were written. Raises DamagedSnapshot."""
    plan = told_of(snapshot)
    try:
        for rank, digests in plan["digests"].items():
            own = folder_of(snapshot.path, int(rank))
            try:
                indexes = _indexed(digests, own)
                for name, digest in digests.items():
                    if name in indexes:
                        found = _put_together(snapshot.path, int(rank), name)
                    else:
                        found = _digest(own, name)
                    _compare(snapshot, int(rank), name, (found, digest))
            finally:
                os.close(own)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedSnapshot(f"{snapshot.path} can't be read: {error}.") from error
    return plan


@contextlib.contextmanager
def images_of(snapshot: ProcessSnapshot) -> Iterator[tuple[dict[str, Any], dict[int, int]]]:
    """Give the plan of a snapshot, and of each rank a descriptor of the folder of its images.

    All bytes are as they were written. Raises DamagedSnapshot.
    """
    with contextlib.ExitStack() as stack:
        try:
            plan = told_of(snapshot)
            indexes = list(snapshot.path.glob(f"rank-*/*{INDEX}"))
            size = PAGE * sum(path.stat().st_size // INDEX_BYTES for path in indexes)
            within = None if looked_at.available_memory() > ROOM * size else snapshot.path.parent
            folders = {
                int(rank): _images(snapshot, int(rank), digests, within, stack)
                for rank, digests in plan["digests"].items()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedSnapshot(f"{snapshot.path} can't be read: {error}.") from error
        yield plan, folders


def _images(
    snapshot: ProcessSnapshot,
    rank: int,
    digests: Mapping[str, str],
    within: Path | None,
    stack: contextlib.ExitStack,
) -> int:
    """Return a rank's folder, or a new one if its pages are elsewhere: in memory, or within that one.

    Raises DamagedSnapshot or OSError.
    """
    own = folder_of(snapshot.path, rank)
    stack.callback(os.close, own)
    indexes = _indexed(digests, own)
    folder = own
    if indexes and within is None:
        folder = stack.enter_context(nameless_folder())
    elif indexes:
        new = stack.enter_context(tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=within))
        folder = os.open(new, OPEN)
        stack.callback(os.close, folder)
    for name, digest in digests.items():
        if name in indexes:
            found = _put_together(snapshot.path, rank, name, folder)
        else:
            found = _digest(own, name, Path(f"/proc/self/fd/{folder}/{name}") if indexes else None)
        _compare(snapshot, rank, name, (found, digest))
    return folder


def _indexed(digests: Mapping[str, str], folder: int) -> set[str]:
    """Return which of a rank's images are pages that are elsewhere."""
    there = set(os.listdir(folder))
    return {name for name in digests if f"{name}{INDEX}" in there}


def _compare(snapshot: ProcessSnapshot, rank: int, name: str, digests: tuple[str, str]) -> None:
    if digests[0] != digests[1]:
        raise DamagedSnapshot(f"{snapshot.path / f'rank-{rank}' / name} is not what was written.")


def _put_together(path: Path, rank: int, name: str, folder: int | None = None) -> str:
    """Return the digest of an image of pages, which is written into a folder on the way. Raises OSError."""
    index = read_index(path / f"rank-{rank}" / f"{name}{INDEX}")
    digest = xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        file = None
        if folder is not None:
            file = stack.enter_context(open(f"/proc/self/fd/{folder}/{name}", "xb"))
        for piece in pieces(path.parent / PAGES, index):
            digest.update(piece)
            if file is not None:
                file.write(piece)
    return digest.hexdigest()


def folder_of(path: Path, rank: int) -> int:
    """Return a descriptor of a rank's folder in a snapshot. Raises OSError."""
    return os.open(path / f"rank-{rank}", OPEN)


def _digest(folder: int, name: str, to: Path | None = None) -> str:
    """Return the digest of a file, which is copied on the way if `to` is given. Raises OSError."""
    digest = xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(folder, name))
        copy = None if to is None else stack.enter_context(open(to, "wb"))
        while piece := file.read(PIECE):
            digest.update(piece)
            if copy is not None:
                copy.write(piece)
    return digest.hexdigest()


def _index(folder: int, name: str, adding: Adding, to: Path) -> str:
    """Store the pages of an image, and where they are in `to`; return its digest. Raises OSError."""
    digest = xxhash.xxh3_128()
    with _opened(folder, name) as file:
        to.write_bytes(adding.index(file, digest).tobytes())
    sync(to)
    return digest.hexdigest()


def _opened(folder: int, name: str) -> BinaryIO:
    return open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb")


def _bytes_on_disk(path: Path) -> int:
    return sum(one.stat().st_blocks * BLOCK for one in path.rglob("*"))


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, be on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
