"""The folder of a suspended job's images: its user's alone, whole or refused, and gone with the launcher."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from jitckpt.errors import JitckptError
from jitckpt.system.left_folders import OPEN, hold, left_folders

PREFIX = "jitckpt-suspended-"
PIECE = 4 << 20  # bytes


class DamagedImage(JitckptError):
    """An image is not what was written; the text is a sentence."""


@dataclass(frozen=True)
class Written:
    """What a rank's images are: the digest of each, by name, and the bytes of all."""

    digests: Mapping[str, str]
    bytes: int


class ImageFolder:
    """A new one. Who lives holds a lock. Raises OSError."""

    def __init__(self, within: Path) -> None:
        within.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=within))  # for this user alone
        self._lock = os.open(self.path, OPEN)
        hold(self._lock)
        self._ranks: dict[int, int] = {}

    def of(self, rank: int) -> int:
        """Return a descriptor of the rank's own folder, while this one is there. Raises OSError."""
        if rank not in self._ranks:
            path = self.path / f"rank-{rank}"
            path.mkdir(0o700)
            self._ranks[rank] = os.open(path, OPEN)
        return self._ranks[rank]

    def written(self, rank: int) -> Written:
        """Return what is in the rank's folder. Raises OSError."""
        folder, digests, size = self.of(rank), {}, 0
        for name in sorted(os.listdir(folder)):
            if name.endswith(".log"):
                continue
            digest = xxhash.xxh3_128()
            with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
                while piece := file.read(PIECE):
                    digest.update(piece)
                    size += len(piece)
            digests[name] = digest.hexdigest()
        return Written(digests, size)

    def check(self, rank: int, before: Written) -> None:
        """Raises DamagedImage if the rank's images are not those, or OSError."""
        now = self.written(rank).digests
        for name in sorted(before.digests.keys() | now.keys()):
            if before.digests.get(name) != now.get(name):
                what = "is not what was written" if name in now else "is gone"
                raise DamagedImage(f"{self.path}/rank-{rank}/{name} {what}.")

    def remove(self) -> None:
        """Take all away. May be called twice."""
        for file in self._ranks.values():
            os.close(file)
        self._ranks.clear()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left(within: Path) -> list[Path]:
    """Take away what launchers have left there that were killed together with their guardians; return it."""
    removed = []
    for path in left_folders(within, PREFIX):
        with suppress(OSError):
            shutil.rmtree(path)
            removed.append(path)
    return removed
