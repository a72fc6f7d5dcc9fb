"""What agents say in visits (hosts/connections.py), each a JSON object with raw bytes behind it.

One asks, the other answers, or refuses. Saves come first, then copies of ranks' states on the devices, then
hosts' parts of snapshots of processes, then what is in hosts' memory.
"""

import re
from dataclasses import dataclass
from typing import Literal

from jitckpt.wire.checked import Checked, CheckedPart


@dataclass(frozen=True)
class Refused(Checked):
    """An answer to anything: it can't be had; why, a sentence or a clause. busy: not now."""

    type = "refused"
    why: str
    busy: bool = False


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
class SavePiece(Checked):
    """A part of the answer to WantFile, which is behind it."""

    type = "piece"


@dataclass(frozen=True)
class EndOfFile(Checked):
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


OF_ALL = -1  # in the place of a rank: a file of the whole part, which is its plan, or pages, by their number
PLAN = "plan.json"
_OF_ALL = re.compile(rf"{re.escape(PLAN)}|\d{{1,10}}")


@dataclass(frozen=True)
class PartFile(CheckedPart):
    """A file of a host's part of a snapshot. bytes: that it takes on the disk, where it may have holes."""

    rank: int
    image: str
    size: int
    bytes: int

    @property
    def is_pages(self) -> bool:
        """Whether other snapshots may have it, too."""
        return self.rank == OF_ALL and self.image != PLAN

    def problem(self) -> str | None:
        if self.rank < OF_ALL or min(self.size, self.bytes) < 0:
            return f"{self!r:.200} is no file"
        if self.rank == OF_ALL:
            return None if _OF_ALL.fullmatch(self.image) else f"{self.image!r:.80} is no file of a snapshot"
        if not self.image or self.image in (".", "..") or "/" in self.image or "\0" in self.image:
            return f"{self.image!r:.80} is no name of an image"
        return None


@dataclass(frozen=True)
class PutSnapshot(Checked):
    """Keep a copy of a host's part of a snapshot: place, of that host. HasNot or VisitDone answers.

    After HasNot the files come (wire/moves.py), and Whole; VisitDone answers, or CameDamaged.
    """

    type = "put_snapshot"
    place: int
    step: int
    name: str
    files: list[PartFile]


@dataclass(frozen=True)
class HasNot(Checked):
    """Of the files these are missing, each by its rank and image. packs: zstd is here."""

    type = "has_not"
    files: list[tuple[int, str]]
    packs: bool


@dataclass(frozen=True)
class CameDamaged(Checked):
    """What has come is not what was written; which, a sentence."""

    type = "came_damaged"
    why: str


@dataclass(frozen=True)
class WantSnapshot(Checked):
    """Give the copy of a host's part of a snapshot. ItsFiles answers; after HasNot they come, and Whole."""

    type = "want_snapshot"
    place: int
    step: int
    name: str


@dataclass(frozen=True)
class ItsFiles(Checked):
    """The answer to WantSnapshot."""

    type = "its_files"
    files: list[PartFile]


class OfMemory(Checked):
    """What is asked of a host's memory."""


@dataclass(frozen=True)
class Go(Checked):
    """What was spoken of may come; the connection is the chunks' from here on."""

    type = "go"


@dataclass(frozen=True)
class VisitDone(Checked):
    """What was asked for is done."""

    type = "done"


@dataclass(frozen=True)
class IndexComes(Checked):
    """The index of what is to come, behind this."""

    type = "index"


@dataclass(frozen=True)
class TailComes(Checked):
    """Tensors of a shard that were on the host, behind this."""

    type = "tail"


@dataclass(frozen=True)
class Put(OfMemory):
    """Keep this rank's shard. seal: in hex.

    IndexComes follows; Has answers, if need be several times, and Go; the other chunks go, VisitDone answers.
    """

    type = "put"
    rank: int
    slot: int
    seal: str


@dataclass(frozen=True)
class Has(Checked):
    """Of what is to come so many chunks are there already, from this one on."""

    type = "has"
    first: int
    count: int


@dataclass(frozen=True)
class WantHeld(OfMemory):
    """Which whole shards are there? Answered by Shards."""

    type = "want_held"


@dataclass(frozen=True)
class HeldShard(CheckedPart):
    """A whole shard that a tier has: whose, of which step, and of which start's minibatches.

    members: the ranks among which it is cut, if so.
    """

    rank: int
    step: int
    timeline: str
    bytes: int
    job: str
    world_size: int
    start: int = 0  # its number
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shards(Checked):
    """The answer to WantHeld."""

    type = "shards"
    there: list[HeldShard]


@dataclass(frozen=True)
class WantShard(OfMemory):
    """Give this shard. There answers; after Go the chunks come, and without it none."""

    type = "want_shard"
    rank: int
    step: int
    timeline: str


@dataclass(frozen=True)
class WantChunks(OfMemory):
    """Give chunks of this shard: VisitDone answers; after Go they come."""

    type = "want_chunks"
    rank: int
    step: int
    timeline: str
    first: int
    count: int


@dataclass(frozen=True)
class There(Checked):
    """What is wanted is there, its index behind this. seal: in hex. slot: a parity has none."""

    type = "there"
    seal: str
    slot: int = 0


@dataclass(frozen=True)
class Drop(OfMemory):
    """Forget this shard. VisitDone answers."""

    type = "drop"
    rank: int
    step: int


@dataclass(frozen=True)
class WantGathered(OfMemory):
    """Of which step have you got all that your ranks need? Answered by Gathered."""

    type = "want_gathered"


@dataclass(frozen=True)
class Gathered(Checked):
    """The answer to WantGathered; 0: of none, None: that is not known yet."""

    type = "gathered"
    step: int | None


@dataclass(frozen=True)
class WantCollected(OfMemory):
    """You end: have you got what you need of others? Answered by Collected."""

    type = "want_collected"


@dataclass(frozen=True)
class Collected(Checked):
    """The answer to WantCollected."""

    type = "collected"
    all: bool


@dataclass(frozen=True)
class Add(OfMemory):
    """Put a cell of a rank's shard under your parity of this group. As with Put."""

    type = "add"
    rank: int
    slot: int
    seal: str
    group: list[int]
    place: int
    keep: int
    copies: int = 0


@dataclass(frozen=True)
class WantParities(OfMemory):
    """Which whole parities are there? Answered by Parities."""

    type = "want_parities"


@dataclass(frozen=True)
class HeldParity(CheckedPart):
    """A whole parity that a host has.

    members: of the shards under it that are cut, among which ranks they are.
    """

    group: tuple[int, ...]
    place: int
    step: int
    timeline: str
    bytes: int
    job: str
    world_size: int
    copies: int = 0
    members: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Parities(Checked):
    """The answer to WantParities."""

    type = "parities"
    there: list[HeldParity]


@dataclass(frozen=True)
class WantParity(OfMemory):
    """Give this parity: There answers; after Go its first `count` chunks come, if there are any to come."""

    type = "want_parity"
    group: list[int]
    place: int
    step: int
    timeline: str
    count: int
    copies: int = 0


@dataclass(frozen=True)
class PutPart(OfMemory):
    """Keep this part of a rank's shard. As with Put; in_directory: not in memory."""

    type = "put_part"
    rank: int
    slot: int
    seal: str
    in_directory: bool


@dataclass(frozen=True)
class WantParts(OfMemory):
    """Which parts of shards are there? Answered by Parts."""

    type = "want_parts"


@dataclass(frozen=True)
class HeldPart(CheckedPart):
    """Chunks of a rank's shard of a step that a host has, from the first on; chunks: that all of it has.

    bytes: of the part. of: the checksum of the shard's index, in hexadecimal.
    """

    rank: int
    step: int
    timeline: str
    first: int
    count: int
    chunks: int
    bytes: int
    job: str
    world_size: int
    start: int
    of: str


@dataclass(frozen=True)
class Parts(Checked):
    """The answer to WantParts: what is in memory, and what in the directory."""

    type = "parts"
    in_memory: list[HeldPart]
    in_directory: list[HeldPart]


@dataclass(frozen=True)
class WantPart(OfMemory):
    """Give this part of a shard: There answers; after Go its chunks come, if `all` are wanted."""

    type = "want_part"
    rank: int
    step: int
    timeline: str
    in_directory: bool
    all: bool


@dataclass(frozen=True)
class Remake(OfMemory):
    """Make a step of this rank's shard. digests: in hex, of what will be sent of it.

    IndexComes and TailComes follow; Go answers, the chunks go, VisitDone, Lacks or Differs answers. Lacks may
    come in the place of Go.
    """

    type = "remake"
    rank: int
    slot: int
    seal: str
    digests: list[str]


@dataclass(frozen=True)
class Lacks(Checked):
    """The step can't be made: what would be needed; lasts: and may be missing the next time, too."""

    type = "lacks"
    what: str
    lasts: bool


@dataclass(frozen=True)
class Differs(Checked):
    """Other bits have come out; behind this each tensor's digest, of each way that the step was made."""

    type = "differs"


@dataclass(frozen=True)
class Fails(Checked):
    """The step can't be made there at all, and the next one can't either."""

    type = "fails"
    why: str


OF_MEMORY: tuple[type[OfMemory], ...] = (
    *(Put, WantHeld, WantShard, WantChunks, Drop, WantGathered, WantCollected),
    *(Add, WantParities, WantParity),
    *(PutPart, WantParts, WantPart),
    Remake,
)
