"""What the agents of one job tell each other, each a JSON object with raw bytes behind it (hosts/link.py).

A link's own messages begin the list, then those between control threads, then those of the memory tier.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked

Told = Literal["nothing", "kill", "terminate"]  # to a rank before it ended


class Message(Checked):
    """What an agent tells another one."""


@dataclass(frozen=True)
class Receipt(Message):
    """Say `Received` with this number: all that was sent before has come then."""

    type = "receipt"
    number: int


@dataclass(frozen=True)
class Received(Message):
    """The answer to Receipt."""

    type = "received"
    number: int


@dataclass(frozen=True)
class TakesPlace(Message):
    """Another agent, at this address, is about to come in the place of the one that says so."""

    type = "takes_place"
    address: str
    port: int

    def problem(self) -> str | None:
        return None if 0 < self.port < 1 << 16 else f"{self.port} is no port"


@dataclass(frozen=True)
class LastWords(Message):
    """The answer to TakesPlace: what is said from here on is for who comes in that place."""

    type = "last_words"


@dataclass(frozen=True)
class Said(Message):
    """What a rank of the host has said, as wire/protocol.py has it."""

    type = "said"
    rank: int
    text: str


@dataclass(frozen=True)
class Order(Message):
    """An order for a rank of the other host, as wire/protocol.py has it."""

    type = "order"
    rank: int
    text: str


@dataclass(frozen=True)
class Stopped(Message):
    """A rank that was ordered something is stopped, and so can't answer."""

    type = "stopped"
    rank: int


@dataclass(frozen=True)
class Ended(Message):
    """A rank of the host has ended."""

    type = "ended"
    rank: int
    exit_code: int
    told: Told


@dataclass(frozen=True)
class Dying(Message):
    """A rank of the host is about to end with this exit code."""

    type = "dying"
    rank: int
    exit_code: int


@dataclass(frozen=True)
class Alarm(Message):
    """A failure that only this host knows. blamed: the ranks that have caused it."""

    type = "alarm"
    cause: str
    text: str
    blamed: list[int]


@dataclass(frozen=True)
class TakesIn(Message):
    """All ranks are to be saved, to start again with the hosts that wait: who, a clause."""

    type = "takes_in"
    who: str


@dataclass(frozen=True)
class WantSave(Message):
    """The user wants the state after this step saved."""

    type = "want_save"
    step: int


@dataclass(frozen=True)
class StacksWanted(Message):
    """Say where this rank is."""

    type = "stacks_wanted"
    rank: int


@dataclass(frozen=True)
class Stacks(Message):
    """The answer to StacksWanted, with the stacks behind it. driver: lines of the kernel's log."""

    type = "stacks"
    rank: int
    driver: list[str]


@dataclass(frozen=True)
class RingPart(Message):
    """What stands at this place in a rank's ring of this size, behind it."""

    type = "ring_part"
    rank: int
    size: int
    at: int


@dataclass(frozen=True)
class ProxySays(Message):
    """What a rank's device proxy says, behind it. new_device: the rank's failure is mended by that."""

    type = "proxy_says"
    rank: int
    new_device: bool = False


@dataclass(frozen=True)
class ProxyOrder(Message):
    """What a rank's device proxy is told, behind it."""

    type = "proxy_order"
    rank: int


@dataclass(frozen=True)
class ProxyGone(Message):
    """Nothing more is heard of a rank's device proxy; why, a clause."""

    type = "proxy_gone"
    rank: int
    why: str


@dataclass(frozen=True)
class RanksMoved(Message):
    """All ranks of the host have come from another one, which it is in the place of.

    size: of their processes' images. dump, transfer, restore: the seconds that each of these took.
    """

    type = "ranks_moved"
    ranks: list[int]
    size: int
    dump: float
    transfer: float
    restore: float


@dataclass(frozen=True)
class StepBarrier(Message):
    """What the ranks behind this host, or all, have come to (decisions/step_tree.py)."""

    type = "step_barrier"
    recovery_and_step: int
    whole_from: int
    left: bool

    def problem(self) -> str | None:
        return None if min(self.recovery_and_step, self.whole_from) >= 0 else "it has a negative number"


@dataclass(frozen=True)
class Kept(Message):
    """The hosts `by` have a rank's state after these steps; those of `parts` the newest, all together.

    seconds: that the snapshot of step `took` took, where that is known (not 0), and a step of the rank.
    """

    type = "kept"
    rank: int
    steps: list[int]
    by: list[int]
    parts: list[int] = field(default_factory=list)
    took: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class SnapshotSkipped(Message):
    """A rank has left the snapshot of a step out."""

    type = "snapshot_skipped"
    rank: int
    step: int


@dataclass(frozen=True)
class NoSnapshots(Message):
    """A rank makes no snapshots any more."""

    type = "no_snapshots"
    rank: int


@dataclass(frozen=True)
class ProtectionEnds(Message):
    """What is in memory is not to be used any more, as this rank makes no snapshots."""

    type = "protection_ends"
    rank: int


@dataclass(frozen=True)
class Allow(Message):
    """A rank's shards will be sent to who hears this."""

    type = "allow"
    rank: int


@dataclass(frozen=True)
class Safe(Message):
    """A step that all ranks have, and all holders; settled: what comes later is not waited for any more.

    keepers: of each host which hosts keep its ranks' shards; empty: as before. parts: of each host which
    hosts keep these all together. every, since, why: how often there is a snapshot, from which step on; every
    0: as before.
    """

    type = "safe"
    safe: int
    settled: int
    keepers: list[list[int]] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    every: int = 0
    since: int = 0
    why: str = ""

    def problem(self) -> str | None:
        return None if self.every >= 0 else f"every {self.every} steps is no rule"


@dataclass(frozen=True)
class NoRoom(Message):
    """No host has room for a copy of some rank's state as a whole: who has room for parts of it?"""

    type = "no_room"


@dataclass(frozen=True)
class WantRoom(Message):
    """For how much have you room, and how much have you to send? Answered by Room."""

    type = "want_room"
    number: int


@dataclass(frozen=True)
class Room(Message):
    """The answer to WantRoom (decisions.spreading.Room). needs: by rank; rates: by host."""

    type = "room"
    number: int
    needs: dict[str, int]
    memory: int
    directory: int
    beside: int
    rates: dict[str, float]
    into_directory: float


class PartTo(TypedDict):
    """Where a part goes, see decisions.spreading.Part."""

    rank: int
    host: int
    in_directory: bool
    first: int
    count: int


@dataclass(frozen=True)
class SpreadOut(Message):
    """From now on parts go so; for lacking ranks there is too little room.

    seconds: that the longest link needs; 0: no link is measured.
    """

    type = "spread_out"
    parts: list[PartTo]
    seconds: float
    lacking: list[int]


@dataclass(frozen=True)
class GivenBack(Message):
    """Who says this has needed its memory, and has no parts of these ranks' states any more."""

    type = "given_back"
    ranks: list[int]


OF_SPREADING = (NoRoom, WantRoom, Room, SpreadOut, GivenBack)
OF_MEMORY = (Kept, SnapshotSkipped, NoSnapshots, ProtectionEnds, Allow, Safe, *OF_SPREADING)
OfSpreading = NoRoom | WantRoom | Room | SpreadOut | GivenBack
OfMemory = Kept | SnapshotSkipped | NoSnapshots | ProtectionEnds | Allow | Safe | OfSpreading
OF_PROXIES = (ProxySays, ProxyOrder, ProxyGone, RanksMoved, StepBarrier)
KINDS = checked.by_type(
    (
        *(Receipt, Received, TakesPlace, LastWords),
        *(Said, Order, Stopped, Ended, Dying, Alarm, TakesIn, WantSave, StacksWanted, Stacks, RingPart),
        *OF_PROXIES,
        *OF_MEMORY,
    )
)


def encode(message: Message) -> dict[str, Any]:
    """Return the message as a link sends it."""
    return checked.content_of(message)


def decode(header: object) -> Message:
    """Return the message that a link has brought. Raises ProtocolError for anything that is none."""
    return checked.understood(KINDS, header)
