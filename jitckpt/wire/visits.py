"""What agents say in visits (hosts/connections.py), each a JSON object with raw bytes behind it.

One asks, the other answers, or refuses. Saves come first, then copies of ranks' states on the devices.
"""

from dataclasses import dataclass
from typing import Literal

from jitckpt.wire.checked import Checked


@dataclass(frozen=True)
class Refused(Checked):
    """An answer to anything: it can't be had; why, a sentence or a clause."""

    type = "refused"
    why: str


@dataclass(frozen=True)
class WantSaves(Checked):
    """Which saves are there? known: a digest of the same list as it is here."""

    type = "want_saves"
    known: str


@dataclass(frozen=True)
class Saves(Checked):
    """The answer to WantSaves, with the metadata of all behind it; or with nothing, as they are known."""

    type = "saves"
    known: bool


@dataclass(frozen=True)
class WantFile(Checked):
    """Give this file of a save."""

    type = "want_file"
    step: int
    kind: Literal["rank", "local"]
    rank: int
    file: str


@dataclass(frozen=True)
class Piece(Checked):
    """A part of the answer to WantFile, which is behind it."""

    type = "piece"


@dataclass(frozen=True)
class End(Checked):
    """The end of the answer to WantFile."""

    type = "end"


@dataclass(frozen=True)
class WantCopy(Checked):
    """Give the copy of this rank's state that was made for this recovery."""

    type = "want_copy"
    rank: int
    recovery: tuple[int, int]


@dataclass(frozen=True)
class CopyPiece(Checked):
    """A part of the answer to WantCopy, which is behind it, with its checksum."""

    type = "copy_piece"
    sum: str
