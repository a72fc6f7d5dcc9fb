"""Memory in which the agent says behind which optimizer step all its ranks wait, and they how far they are.

A word for the agent's step (0: none), and one for each rank: the newest step that it has begun. Behind them,
for ranks that are made again from a snapshot, which rehearsed failures have happened since.
"""

import json
import os
import struct
from collections.abc import Sequence

from jitckpt.wire.environment import REST

_WORD = struct.Struct("<Q")


class RestingPlace:
    """The agent's side, of one start of its ranks. file: the memory."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.file = os.memfd_create("jitckpt-rest", os.MFD_CLOEXEC)
        os.ftruncate(self.file, (1 + ranks) * _WORD.size)

    def of(self, local_rank: int) -> dict[str, str]:
        """Return what one of the ranks needs in its environment."""
        return REST.to(f"/proc/{os.getpid()}/fd/{self.file}#{local_rank}")

    def want(self, step: int) -> None:
        """Have all ranks wait behind that step; 0: behind none."""
        os.pwrite(self.file, _WORD.pack(step), 0)

    @property
    def steps(self) -> list[int]:
        """The newest step that each rank has begun."""
        data = os.pread(self.file, self._ranks * _WORD.size, _WORD.size)
        return [step for (step,) in _WORD.iter_unpack(data)]

    def go_on_from(self, steps: Sequence[int], fired: Sequence[str]) -> None:
        """The ranks, which have not mapped it yet, have begun these steps. fired: failures, as texts."""
        said = json.dumps(list(fired)).encode()
        words = b"".join(_WORD.pack(step) for step in (0, *steps, len(said)))
        os.pwrite(self.file, words + said, 0)

    def close(self) -> None:
        """Who has it open keeps it."""
        os.close(self.file)


class Guest:
    """A rank's side."""

    def __init__(self, place: str) -> None:
        """place: as the environment has it. Raises OSError or ValueError."""
        path, _, local_rank = place.rpartition("#")
        self._own = (1 + int(local_rank)) * _WORD.size
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def begins(self, step: int) -> bool:
        """This rank begins that step. Return whether all ranks are to wait behind it."""
        os.pwrite(self._file, _WORD.pack(step), self._own)
        return os.pread(self._file, _WORD.size, 0) == _WORD.pack(step)

    @property
    def fired(self) -> list[str]:
        """The rehearsed failures that have happened before this rank was made again."""
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        at = (1 + ranks) * _WORD.size
        head = os.pread(self._file, _WORD.size, at)
        if not head:
            return []
        size: int = _WORD.unpack(head)[0]
        return [str(text) for text in json.loads(os.pread(self._file, size, at + _WORD.size))]

    def close(self) -> None:
        """It is told nothing any more."""
        os.close(self._file)
