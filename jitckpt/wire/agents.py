"""What the agents of one job tell each other, each a JSON object with raw bytes behind it (hosts/link.py).

What is said first on a link comes first, then a link's own messages, then those between control threads, then
those of the memory tier.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked, CheckedPart

Told = Literal["nothing", "kill", "terminate"]  # to a rank before it ended


class FirstWords(Checked):
    """What an agent says first that has called another one."""


@dataclass(frozen=True)
class Calls(FirstWords):
    """It is this host's, and stays connected: Messages follow."""

    type = "calls"
    host: int


@dataclass(frozen=True)
class Visits(FirstWords):
    """It comes for once, for what wire/visits.py has of this."""

    type = "visits"
    what: str


class AgentMessage(Checked):
    """What an agent tells another one."""


@dataclass(frozen=True)
class Alive(AgentMessage):
    """The agent lives; that is all."""

    type = "alive"


@dataclass(frozen=True)
class Receipt(AgentMessage):
    """Say `Received` with this number: all that was sent before has come then."""

    type = "receipt"
    number: int


@dataclass(frozen=True)
class Received(AgentMessage):
    """The answer to Receipt."""

    type = "received"
    number: int


@dataclass(frozen=True)
class TakesPlace(AgentMessage):
    """Another agent, at this address, is about to come in the place of the one that says so.

    reserve: the port of its store in reserve, 0 if it has none.
    """

    type = "takes_place"
    address: str
    port: int
    reserve: int = 0

    def problem(self) -> str | None:
        if not 0 <= self.reserve < 1 << 16:
            return f"{self.reserve} is no port"
        return None if 0 < self.port < 1 << 16 else f"{self.port} is no port"


@dataclass(frozen=True)
class GivesRanks(AgentMessage):
    """The ranks of the one that says so, which stays, go on on one more host, whose agent is at this address.

    It is about to come, as the last of all hosts.
    """

    type = "gives_ranks"
    address: str
    port: int

    def problem(self) -> str | None:
        return None if 0 < self.port < 1 << 16 else f"{self.port} is no port"


@dataclass(frozen=True)
class LastWords(AgentMessage):
    """The answer to TakesPlace and GivesRanks: what is said from here on is for who comes, or for it, too."""

    type = "last_words"


@dataclass(frozen=True)
class WantsTurn(AgentMessage):
    """To the first host: this one is to be left, and would say TakesPlace or GivesRanks. Answered by Turn."""

    type = "wants_turn"


@dataclass(frozen=True)
class Turn(AgentMessage):
    """Nobody else is just leaving: say so now. It is for LeavesTurn where that does not come to be."""

    type = "turn"


@dataclass(frozen=True)
class LeavesTurn(AgentMessage):
    """To the first host: this one does not leave now."""

    type = "leaves_turn"


@dataclass(frozen=True)
class Said(AgentMessage):
    """What a rank of the host has said, as wire/protocol.py has it."""

    type = "said"
    rank: int
    text: str


@dataclass(frozen=True)
class Order(AgentMessage):
    """An order for a rank of the other host, as wire/protocol.py has it."""

    type = "order"
    rank: int
    text: str


@dataclass(frozen=True)
class ProcessStopped(AgentMessage):
    """A rank that was ordered something is stopped, and so can't answer."""

    type = "stopped"
    rank: int


@dataclass(frozen=True)
class Ended(AgentMessage):
    """A rank of the host has ended."""

    type = "ended"
    rank: int
    exit_code: int
    told: Told


@dataclass(frozen=True)
class Dying(AgentMessage):
    """A rank of the host is about to end with this exit code."""

    type = "dying"
    rank: int
    exit_code: int


@dataclass(frozen=True)
class HostAlarm(AgentMessage):
    """A failure that only this host knows. blamed: the ranks that have caused it."""

    type = "alarm"
    cause: str
    text: str
    blamed: list[int]


@dataclass(frozen=True)
class TakesIn(AgentMessage):
    """All ranks are to be saved, to start again with the hosts that wait: who, a clause."""

    type = "takes_in"
    who: str


@dataclass(frozen=True)
class WantSave(AgentMessage):
    """The user wants the state after this step saved."""

    type = "want_save"
    step: int


@dataclass(frozen=True)
class StacksWanted(AgentMessage):
    """Say where this rank is."""

    type = "stacks_wanted"
    rank: int


@dataclass(frozen=True)
class Stacks(AgentMessage):
    """The answer to StacksWanted, with the stacks behind it. driver: lines of the kernel's log."""

    type = "stacks"
    rank: int
    driver: list[str]


@dataclass(frozen=True)
class RingPart(AgentMessage):
    """What stands at this place in a rank's ring of this size, behind it."""

    type = "ring_part"
    rank: int
    size: int
    at: int


@dataclass(frozen=True)
class ProxySays(AgentMessage):
    """What a rank's device proxy says, behind it. new_device: the rank's failure is mended by that."""

    type = "proxy_says"
    rank: int
    new_device: bool = False


@dataclass(frozen=True)
class ProxyOrder(AgentMessage):
    """What a rank's device proxy is told, behind it."""

    type = "proxy_order"
    rank: int


@dataclass(frozen=True)
class ProxyGone(AgentMessage):
    """Nothing more is heard of a rank's device proxy; why, a clause."""

    type = "proxy_gone"
    rank: int
    why: str


@dataclass(frozen=True)
class RanksMoved(AgentMessage):
    """All ranks of the host have come from another one, which it is in the place of, or which stays without.

    size: of their processes' images. dump, transfer, restore: the seconds that each of these took.
    """

    type = "ranks_moved"
    ranks: list[int]
    size: int
    dump: float
    transfer: float
    restore: float


@dataclass(frozen=True)
class Come(CheckedPart):
    """What all ranks of some hosts have come to. The same as Together::Come of native/proxy/transport.

    recovery_and_step: in one number, which only grows; 0: none, or they are of different recoveries.
    whole_from: the first step before which all ranks make whole images again; 0: none is known. left: nobody
    waits for the others any more.
    """

    recovery_and_step: int = 0
    whole_from: int = 0
    left: bool = False

    def problem(self) -> str | None:
        return None if min(self.recovery_and_step, self.whole_from) >= 0 else "it has a negative number"


@dataclass(frozen=True)
class StepsCome(AgentMessage):
    """What the ranks behind this host, or all, have come to (decisions/step_tree.py)."""

    type = "steps_come"
    come: Come


@dataclass(frozen=True)
class AskSnapshot(AgentMessage):
    """Can your ranks' processes be written, and how far are they? Answered by SnapshotAnswer."""

    type = "ask_snapshot"
    number: int


@dataclass(frozen=True)
class WaitBehind(AgentMessage):
    """Have your ranks wait behind this step; answered by SnapshotAnswer. 0: behind none, and no answer."""

    type = "wait_behind"
    number: int
    step: int

    def problem(self) -> str | None:
        return None if 0 <= self.step < 1 << 63 else f"{self.step} is no step"


@dataclass(frozen=True)
class SnapshotAnswer(AgentMessage):
    """The answer to the question of this number. steps: the newest that each rank has begun by now.

    size: bytes that the processes need. ready: not before all ranks use their devices. why: the ranks'
    processes can't be written, the end of a sentence; never: that stays so.
    """

    type = "snapshot_answer"
    number: int
    steps: list[int]
    size: int = 0
    ready: bool = True
    why: str = ""
    never: bool = False


@dataclass(frozen=True)
class DumpRanks(AgentMessage):
    """All ranks of the job rest: write the processes of yours. Answered by RanksDumped.

    servers_stay: those of their devices; else they are to be ended before.
    """

    type = "dump_ranks"
    name: str
    step: int
    servers_stay: bool = False


@dataclass(frozen=True)
class RanksDumped(AgentMessage):
    """The host's processes are written, unless it says why not; behind it the keys of the job's store.

    A line of hexadecimal digits for each that a rank may have changed.
    """

    type = "ranks_dumped"
    name: str
    why: str


@dataclass(frozen=True)
class SnapshotTaken(AgentMessage):
    """The processes of all hosts are written, or not all: put it on your disk, or away, and go on."""

    type = "snapshot_taken"
    name: str
    made: bool


@dataclass(frozen=True)
class SnapshotPut(AgentMessage):
    """The host's part of a snapshot is on its disk, unless it says why not; in bytes, as shelf.Size is."""

    type = "snapshot_put"
    name: str
    why: str
    images: int
    stored: int
    disk: int


@dataclass(frozen=True)
class SnapshotWhole(AgentMessage):
    """A snapshot is on the disks of all hosts, and older ones may go; or it is not, and goes itself.

    ends: the job is suspended with it. Answered by EndAwaited: no host that is lost from now on is missed.
    """

    type = "snapshot_whole"
    name: str
    made: bool
    ends: bool = False


@dataclass(frozen=True)
class EndAwaited(AgentMessage):
    """This host's launcher ends as soon as it hears that all wait for that, or a host is lost."""

    type = "end_awaited"
    name: str


@dataclass(frozen=True)
class AskSuspension(AgentMessage):
    """Somebody wants the job to be suspended."""

    type = "ask_suspension"


@dataclass(frozen=True)
class SuspensionSays(AgentMessage):
    """A sentence for who has asked for that on any host; status: with which the command ends then, if so.

    0: the job is suspended, and this host's launcher ends, too.
    """

    type = "suspension_says"
    text: str
    status: int | None = None


@dataclass(frozen=True)
class CopySnapshot(AgentMessage):
    """Have so many other hosts get a copy of your part of this snapshot, which is whole on all hosts.

    size: of a part, in bytes. seconds: over which it may be spread. Answered by SnapshotCopied. The snapshot
    stays until SnapshotProtected is said of it.
    """

    type = "copy_snapshot"
    step: int
    name: str
    copies: int
    size: int
    seconds: float = 0.0

    def problem(self) -> str | None:
        return None if min(self.copies, self.size, self.seconds) >= 0 else "it has a negative number"


@dataclass(frozen=True)
class SnapshotCopied(AgentMessage):
    """The answer to CopySnapshot: they have, or why not all, a clause. bytes: that were sent."""

    type = "snapshot_copied"
    name: str
    why: str
    bytes: int


@dataclass(frozen=True)
class SnapshotProtected(AgentMessage):
    """The copies of all hosts' parts of a snapshot are whole, or not all will be: older ones may go."""

    type = "snapshot_protected"
    step: int
    name: str
    made: bool


@dataclass(frozen=True)
class ForgetSnapshots(AgentMessage):
    """What was recovered may be wrong, and is in the snapshots: none of them is of any use."""

    type = "forget_snapshots"


@dataclass(frozen=True)
class RanksMadeAgain(AgentMessage):
    """The host's ranks are there again as in this snapshot, unless it says why not."""

    type = "ranks_made_again"
    name: str
    why: str


@dataclass(frozen=True)
class Keepers(CheckedPart):
    """Where a host's ranks' newest step is: the hosts `by` have all of it, those of `parts` all together."""

    host: int
    by: list[int]
    parts: list[int]


@dataclass(frozen=True)
class Counted(AgentMessage):
    """All ranks of these hosts have these steps, and so have their keepers (decisions/step_count.py).

    kept: of those hosts whose keepers are not those that were to be. seconds: that the slowest snapshot of
    step `took` took, where that is known (not 0), and the shortest step of a rank.
    """

    type = "counted"
    hosts: list[int]
    steps: list[int]
    kept: list[Keepers] = field(default_factory=list)
    took: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class SnapshotSkipped(AgentMessage):
    """A rank has left the snapshot of a step out."""

    type = "snapshot_skipped"
    rank: int
    step: int


@dataclass(frozen=True)
class NoSnapshots(AgentMessage):
    """A rank makes no snapshots any more."""

    type = "no_snapshots"
    rank: int


@dataclass(frozen=True)
class ProtectionEnds(AgentMessage):
    """What is in memory is not to be used any more, as this rank makes no snapshots."""

    type = "protection_ends"
    rank: int


@dataclass(frozen=True)
class Allow(AgentMessage):
    """A rank's shards will be sent to who hears this."""

    type = "allow"
    rank: int


@dataclass(frozen=True)
class Safe(AgentMessage):
    """A step that all ranks have, and all holders; settled: what comes later is not waited for any more.

    keepers: of each host which hosts keep its ranks' shards; empty: as before. parts: of each host which
    hosts keep these all together. every, since, why: how often there is a snapshot, from which step on; every
    0: as before. gradients: these are sent then, in the place of whole states.
    """

    type = "safe"
    safe: int
    settled: int
    keepers: list[list[int]] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    every: int = 0
    since: int = 0
    why: str = ""
    gradients: bool = False

    def problem(self) -> str | None:
        return None if self.every >= 0 else f"every {self.every} steps is no rule"


@dataclass(frozen=True)
class States(AgentMessage):
    """What this host's ranks have in memory, and what it may take: decisions.memory_method.HostStates."""

    type = "states"
    states: list[int]
    sent: list[int]
    chunks: list[int]
    went: list[int]
    memory: int

    def problem(self) -> str | None:
        if len(self.states) != len(self.chunks) or len(self.sent) != len(self.went):
            return "it tells of some ranks in part"
        if min((*self.states, *self.chunks, *self.sent, *self.went), default=0) < 1 or self.memory < 0:
            return "a rank has nothing"
        return None


@dataclass(frozen=True)
class MethodChosen(AgentMessage):
    """Other hosts keep parity in this start, or copies: decisions.memory_method.ByMemory."""

    type = "method_chosen"
    parity: bool
    why: str


@dataclass(frozen=True)
class NoGradients(AgentMessage):
    """Whole states are to be sent again: why, a clause."""

    type = "no_gradients"
    why: str


@dataclass(frozen=True)
class IdleCarries(AgentMessage):
    """So many minibatches' idle time on the network carries a snapshot of this host; why, a clause.

    every: 0 where the idle spans do not carry it, or not any more.
    """

    type = "idle_carries"
    every: int
    why: str


@dataclass(frozen=True)
class NoRoom(AgentMessage):
    """No host has room for a copy of some rank's state as a whole: who has room for parts of it?"""

    type = "no_room"


@dataclass(frozen=True)
class WantRoom(AgentMessage):
    """For how much have you room, and how much have you to send? Answered by Room."""

    type = "want_room"
    number: int


@dataclass(frozen=True)
class Room(AgentMessage):
    """The answer to WantRoom (decisions.spreading.HostRoom). needs: by rank; rates: by host."""

    type = "room"
    number: int
    needs: dict[str, int]
    memory: int
    directory: int
    beside: int
    rates: dict[str, float]
    into_directory: float


@dataclass(frozen=True)
class SentPart(CheckedPart):
    """So many chunks of a rank's shard, from the first one on, that a host keeps."""

    rank: int
    host: int
    in_directory: bool
    first: int
    count: int


@dataclass(frozen=True)
class SpreadOut(AgentMessage):
    """From now on parts go so; for lacking ranks there is too little room.

    seconds: that the longest link needs; 0: no link is measured.
    """

    type = "spread_out"
    parts: list[SentPart]
    seconds: float
    lacking: list[int]


@dataclass(frozen=True)
class GivenBack(AgentMessage):
    """Who says this has needed its memory, and has no parts of these ranks' states any more."""

    type = "given_back"
    ranks: list[int]


OF_SPREADING = (NoRoom, WantRoom, Room, SpreadOut, GivenBack)
OF_METHOD = (States, MethodChosen, NoGradients, IdleCarries)
OF_STEPS = (Counted, SnapshotSkipped, NoSnapshots, ProtectionEnds, Allow, Safe)
OF_MEMORY = (*OF_STEPS, *OF_METHOD, *OF_SPREADING)
OfSpreading = NoRoom | WantRoom | Room | SpreadOut | GivenBack
OfMethod = States | MethodChosen | NoGradients | IdleCarries
OfSteps = Counted | SnapshotSkipped | NoSnapshots | ProtectionEnds | Allow | Safe
OfMemory = OfSteps | OfMethod | OfSpreading
OF_SNAPSHOTS = (
    *(AskSnapshot, WaitBehind, SnapshotAnswer, DumpRanks, RanksDumped, SnapshotTaken, SnapshotPut),
    *(SnapshotWhole, EndAwaited, AskSuspension, SuspensionSays, ForgetSnapshots, RanksMadeAgain),
    *(CopySnapshot, SnapshotCopied, SnapshotProtected),
)
OF_PROXIES = (ProxySays, ProxyOrder, ProxyGone, RanksMoved, StepsCome, *OF_SNAPSHOTS)
# What each host tells all others.
TO_ALL = (Said, Ended, Dying, HostAlarm, TakesIn, WantSave)
FIRST_WORDS: dict[str, type[FirstWords]] = checked.by_type((Calls, Visits))
KINDS: dict[str, type[AgentMessage]] = checked.by_type(
    (
        *(Alive, Receipt, Received, WantsTurn, Turn, LeavesTurn, TakesPlace, GivesRanks, LastWords),
        *(
            Said,
            Order,
            ProcessStopped,
            Ended,
            Dying,
            HostAlarm,
            TakesIn,
            WantSave,
            StacksWanted,
            Stacks,
            RingPart,
        ),
        *OF_PROXIES,
        *OF_MEMORY,
    )
)


def encode(message: AgentMessage | FirstWords) -> dict[str, Any]:
    """Return the message as a link sends it."""
    return checked.content_of(message)


def decode(header: object) -> AgentMessage:
    """Return the message that a link has brought. Raises ProtocolError for anything that is none."""
    return checked.understood(KINDS, header)
