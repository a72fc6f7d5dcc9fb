"""What is said where all ranks of a host go on on one that stands by (migration/leaving.py, standby.py).

The host that is left says Move, then each ImageFile with its ImagePieces and SamePieces, and Whole.
RanksRestored answers, or Refused as in visits. Then HandOver goes there, and Taken comes back. Bytes stand in
hexadecimal digits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jitckpt.wire.agents import Come, Told
from jitckpt.wire.checked import Checked, CheckedPart
from jitckpt.wire.hosts import PORTS, Host, Past

PROCESSES = range(2, 1 << 31)


def _no_hex(texts: Iterable[str]) -> str | None:
    """Return what is wrong if one of these is not bytes in hexadecimal digits."""
    for text in texts:
        try:
            bytes.fromhex(text)
        except ValueError:
            return f"{text!r:.80} is not hexadecimal"
    return None


WRITTEN = "written-"  # how the names begin under which such files come, beside the images


@dataclass(frozen=True)
class WrittenFile(CheckedPart):
    """A file that a rank writes and other hosts lack, whose content goes there. mode: its permissions."""

    path: str
    mode: int
    user: int
    group: int

    def problem(self) -> str | None:
        if not self.path.startswith("/") or "\0" in self.path:
            return f"{self.path!r:.80} is no path of a file"
        return None if self.mode in range(0o10000) else f"{self.mode} are no permissions"


@dataclass(frozen=True)
class DumpedRank(CheckedPart):
    """What is to be known of a rank whose processes are images, beside these, to make them again.

    pids: of all its processes, the worker first. sockets: inode, kind and name of those whose other ends are
    the agent's; outputs, memory, folders: as decisions.belongings.Carried has them. said: on each socket, and
    not read yet. conversations: with the job's store, for StoreRelay.take_over. askers: who asks for device
    servers, on which socket and from which process, and how the servers of each have ended. files: how long
    each is that it writes, where it goes on on the same host. own_clock: it goes on by that of its images,
    as it did before; else by the host's, unless that is quite another. written: files that come with it.
    """

    rank: int
    pids: tuple[int, ...]
    sockets: tuple[tuple[int, int, str], ...]
    outputs: tuple[tuple[str, int], ...]
    memory: tuple[str, ...]
    folders: tuple[str, ...]
    said: dict[str, list[str]]
    conversations: dict[str, str]
    askers: tuple[tuple[str, int, tuple[tuple[int, str], ...]], ...]
    files: dict[str, int] = field(default_factory=dict)
    own_clock: bool = False
    written: tuple[WrittenFile, ...] = ()

    @property
    def pid(self) -> int:
        """The worker's."""
        return self.pids[0]

    def problem(self) -> str | None:
        if not self.pids or any(pid not in PROCESSES for pid in self.pids):
            return f"{self.pids!r:.80} are no processes"
        names = {name for _, _, name in self.sockets}
        named = {*self.said, *self.conversations, *(name for name, *_ in self.askers)}
        if "agent" not in names or not named <= names:
            return f"{named | {'agent'}!r:.80} are to be among the sockets {names!r:.80}"
        return _no_hex([*self.conversations.values(), *(one for all_ in self.said.values() for one in all_)])


@dataclass(frozen=True)
class JobFacts(CheckedPart):
    """What each agent has to know of the job. run: its identity. workers_store: address and port.

    free: of its restarts, those that do not count. mistakes: what the ranks' programs did wrong in the start
    before this one, as far as that matters. armed: rehearsed failures that have not come yet. past: this
    start, where the hosts meet at a store of their own. number, fence: the same at a coordination service.
    """

    run: str
    restart: int
    workers_store: tuple[str, int]
    free: int = 0
    mistakes: tuple[str, ...] = ()
    armed: tuple[str, ...] = ()
    past: Past | None = None
    number: int = 0
    fence: int = 0

    def problem(self) -> str | None:
        port = self.workers_store[1]
        return None if port in PORTS and port else f"{port} is no port"


@dataclass(frozen=True)
class Move(Checked):
    """All ranks of the host `index` are to go on here: in its place, or as it came for them (Host.ranks_of).

    secret: of this start. relay: by which the ranks reach the store. clock: since the host was started.
    """

    type = "move"
    facts: JobFacts
    index: int
    hosts: list[Host]
    secret: str
    relay: str
    clock: float
    ranks: list[DumpedRank]

    def problem(self) -> str | None:
        if self.index not in range(len(self.hosts)):
            return f"it has {len(self.hosts)} hosts, and is of host {self.index}"
        ranks = [one.rank for one in self.ranks]
        if not ranks or sorted(ranks) != sorted(self.hosts[self.index].ranks):
            return f"the host has the ranks {self.hosts[self.index].ranks!r:.80}, and {ranks!r:.80} come"
        return _no_hex([self.secret]) if self.relay else "the relay has no name"


@dataclass(frozen=True)
class ImageFile(Checked):
    """A file of a rank's images, and how long it is. image: its name; "": the rank's local state."""

    type = "file"
    rank: int
    image: str
    size: int

    def problem(self) -> str | None:
        if "/" in self.image or "\0" in self.image or self.image in (".", ".."):
            return f"{self.image!r:.80} is no name of an image"
        return None if 0 <= self.size < 1 << 63 else f"{self.size} is no size"


MOST_PACKED = 4 << 20  # bytes of a piece


@dataclass(frozen=True)
class ImagePiece(Checked):
    """What stands at this place in such a file, behind this, with its checksum: that of its pages' checksums.

    packed: how many bytes these are, of which zstd has made those that follow; 0: it has not.
    """

    type = "file_part"
    rank: int
    image: str
    at: int
    sum: str
    packed: int

    def problem(self) -> str | None:
        if not 0 <= self.packed <= MOST_PACKED:
            return f"a piece has at most {MOST_PACKED} bytes, and not {self.packed}"
        return None if 0 <= self.at < 1 << 63 else f"{self.at} is no place in a file"


@dataclass(frozen=True)
class SamePiece(Checked):
    """So many bytes of such a file are those that have come at another place, maybe of another file."""

    type = "same_part"
    rank: int
    image: str
    at: int
    size: int
    of_rank: int
    of_image: str
    of_at: int

    @property
    def of(self) -> tuple[int, str]:
        """The other file."""
        return self.of_rank, self.of_image

    def problem(self) -> str | None:
        if not 0 <= self.size <= MOST_PACKED:
            return f"a piece has at most {MOST_PACKED} bytes, and not {self.size}"
        places = range(1 << 62)
        return None if self.at in places and self.of_at in places else f"{self!r:.80} has no place"


@dataclass(frozen=True)
class Whole(Checked):
    """That was all of the files."""

    type = "whole"


@dataclass(frozen=True)
class RanksRestored(Checked):
    """The processes are there. port: where the other agents find this one. seconds: that it took.

    reserve: as a Host has it.
    """

    type = "restored"
    port: int
    seconds: float
    reserve: int = 0

    def problem(self) -> str | None:
        if self.reserve not in PORTS:
            return f"{self.reserve} is no port"
        return None if self.port in PORTS and self.port else f"{self.port} is no port"


@dataclass(frozen=True)
class Steps(CheckedPart):
    """What a host knows of all hosts' steps, see decisions.step_tree.TreePlace."""

    own: Come
    told: Come
    everywhere: Come
    below: list[tuple[int, Come]]


@dataclass(frozen=True)
class Unheard(CheckedPart):
    """A message of wire/agents.py that nobody has acted on, and what was behind it."""

    host: int
    message: dict[str, Any]
    data: str

    def problem(self) -> str | None:
        return _no_hex([self.data])


@dataclass(frozen=True)
class HandOver(Checked):
    """The other agents expect the host that stands by, and no other. What is said to its ranks from here on.

    hosts: as they are by now; others may have come since the Move was said.
    barrier: what the step barrier holds; "": there is none. steps: None where no other host asks for them.
    at_end: the ranks of all hosts whose scripts are at their ends, which they say once. ended: those whose
    processes have ended, with which status, and what they had been told.
    size: bytes that have been sent. dump, transfer, restore: the seconds that each of these took.
    """

    type = "hand_over"
    hosts: list[Host]
    barrier: str
    steps: Steps | None
    unheard: list[Unheard]
    at_end: list[int]
    ended: list[tuple[int, int, Told]]
    size: int
    dump: float
    transfer: float
    restore: float

    def problem(self) -> str | None:
        return _no_hex([self.barrier])


@dataclass(frozen=True)
class Taken(Checked):
    """The ranks are here."""

    type = "taken"
