"""Pages of processes' images, each stored once, by its hash: what has not changed since the last snapshot.

A snapshot's new pages are a file of their own; where each page of an image is, is said by an index of the
snapshot's. What only older snapshots had is given back to the disk.
"""

import contextlib
import os
import secrets
import shutil
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from jitckpt.bindings import holes

PAGE = 4096  # bytes
AT_ONCE = 1024  # pages
INDEX = "Q"  # of an array: number of the file << FILE, and of the page in there
FILE = 32  # bits
NUMBER = 31  # bits, drawn: a host that keeps copies of such files takes none for another of that number
BLOCK = 512  # bytes, of st_blocks


class Pages:
    """All of a directory's. Known are those of the last snapshot that this launcher has made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[bytes, int] = {}

    def begin(self) -> "Adding":
        """Return what takes the pages of another snapshot. Raises OSError."""
        self.folder.mkdir(0o700, exist_ok=True)
        return Adding(self.folder, secrets.randbits(NUMBER), self._known)

    def taken(self, adding: "Adding") -> None:
        """A snapshot that has these is whole."""
        self._known = adding.seen

    def forget(self) -> None:
        """Those that are known may be damaged, or go."""
        self._known = {}

    def keep(self, indexes: Iterable[Path]) -> None:
        """Give back what none of these snapshots' indexes has. Raises OSError if an index can't be read."""
        used: dict[int, set[int]] = {}
        for path in indexes:
            for place in read_index(path):
                used.setdefault(place >> FILE, set()).add(place & ((1 << FILE) - 1))
        if not used:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for name in os.listdir(self.folder):
            path = self.folder / name
            if int(name) in used:
                try:
                    _punch(path, used[int(name)])
                except OSError:  # a file system without holes: the next one is stored as a whole
                    self.forget()
            else:
                path.unlink()

    @property
    def bytes_on_disk(self) -> int:
        """What they take there."""
        with contextlib.suppress(FileNotFoundError):
            return sum((self.folder / name).stat().st_blocks * BLOCK for name in os.listdir(self.folder))
        return 0


class Adding:
    """The pages of one snapshot. seen: all of its, with their places. bytes: of those that are new."""

    def __init__(self, folder: Path, number: int, known: dict[bytes, int]) -> None:
        self._path, self._number, self._known = folder / str(number), number, known
        self._file = self._path.open("xb")
        self.seen: dict[bytes, int] = {}
        self.bytes = 0

    def index(self, image: BinaryIO, whole: "xxhash.xxh3_128") -> "array[int]":
        """Store an image of pages; return where each is. whole: is given all bytes. Raises OSError."""
        index = array(INDEX)
        while piece := image.read(AT_ONCE * PAGE):
            whole.update(piece)
            view = memoryview(piece)
            for at in range(0, len(piece), PAGE):
                index.append(self._place(view[at : at + PAGE]))
        return index

    def _place(self, page: memoryview) -> int:
        digest = xxhash.xxh3_128_digest(page)
        place = self.seen.get(digest)
        if place is None:
            place = self._known.get(digest)
            if place is None:
                self._file.write(page)
                place = self._number << FILE | self.bytes // PAGE
                self.bytes += PAGE
            self.seen[digest] = place
        return place

    def finish(self) -> None:
        """Have all be on the disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def drop(self) -> None:
        """The snapshot is not made."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there are others
            self._path.parent.rmdir()


def read_index(path: Path) -> "array[int]":
    """Return where the pages of an image are. Raises OSError."""
    index = array(INDEX)
    index.frombytes(path.read_bytes())
    return index


def pieces(folder: Path, index: "array[int]") -> Iterator[bytes]:
    """Yield an image's bytes in order. Raises OSError, also where something is missing."""
    with contextlib.ExitStack() as stack:
        files: dict[int, int] = {}
        at = 0
        while at < len(index):
            end = at + 1
            while end < len(index) and end - at < AT_ONCE and index[end] == index[end - 1] + 1:
                end += 1
            number, page = index[at] >> FILE, index[at] & ((1 << FILE) - 1)
            if number not in files:
                files[number] = os.open(folder / str(number), os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, files[number])
            piece = os.pread(files[number], (end - at) * PAGE, page * PAGE)
            if len(piece) < (end - at) * PAGE:
                raise OSError(f"{folder / str(number)} is too short")
            yield piece
            at = end


def _punch(path: Path, used: set[int]) -> None:
    """Give back all other pages of a file, which may have been given back before. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        count = os.fstat(file).st_size // PAGE
        begun = None
        for page in range(count + 1):
            free = page < count and page not in used
            if free and begun is None:
                begun = page
            elif not free and begun is not None:
                holes.punch(file, begun * PAGE, (page - begun) * PAGE)
                begun = None
    finally:
        os.close(file)
