"""The messages between agent and workers, each one JSON object of <= 64 KiB over a SOCK_SEQPACKET socket.

The preloaded library reads and writes some of them too; it knows `save` and `resume` by how their text
begins, so the type comes first and there are no spaces.

wire/checked.py holds what is decoded against the types of the fields.
"""

import os
from dataclasses import dataclass, field
from time import time as now
from typing import Any, Literal, TypedDict

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked

MAX_BYTES = 64 * 1024
MOST_RANKS = 1 << 20


def shortened(text: str, limit: int) -> str:
    """Return `text` cut in the middle to at most `limit` characters; the cut is marked."""
    if len(text) <= limit:
        return text
    mark = "\n[... shortened ...]\n"
    half = (limit - len(mark)) // 2
    return text[:half] + mark + text[-half:]


@dataclass(frozen=True)
class WorkerMessage(Checked):
    """What every message has. `time` is wall time in seconds since the epoch."""

    time: float = field(default_factory=now, kw_only=True)


@dataclass(frozen=True)
class Registered(WorkerMessage):
    """A worker has called jitckpt.init; from now on it can save.

    named_directory: the checkpoint directory as the script named it.
    """

    type = "registered"
    rank: int
    pid: int
    world_size: int
    shard: int
    shards: int
    fingerprint: str
    saver: Literal["builtin", "callback"]
    checkpoint_dir: str
    stack_signal: int = 0  # makes the process write its Python stacks to its file descriptor stack_fd
    stack_fd: int = -1
    named_directory: str = ""

    def problem(self) -> str | None:
        if not 0 <= self.rank < self.world_size <= MOST_RANKS:
            return f"rank {self.rank} of {self.world_size} is none"
        if not 0 <= self.shard < self.shards <= self.world_size:
            return f"shard {self.shard} of {self.shards} is none"
        try:
            whole = b"\0" not in os.fsencode(self.checkpoint_dir)
        except UnicodeEncodeError:
            whole = False
        return None if whole else f"the directory {self.checkpoint_dir!r:.80} can't be one"


@dataclass(frozen=True)
class Group(WorkerMessage):
    """A process group that the rank is in: the ranks of the job, and what its user calls it."""

    type = "group"
    rank: int
    name: str
    ranks: list[int]


@dataclass(frozen=True)
class Hang(WorkerMessage):
    """A collective made no progress for `seconds`. `collectives`: what was in flight, oldest first.

    communicator: an identity that is the same on all of its ranks.
    """

    type = "hang"
    communicator: int | str
    sequence: int
    operation: str
    bytes: int
    seconds: float
    collectives: list[Any] = field(default_factory=list)


class CommunicatorPlace(TypedDict):
    """Where a rank of the job is on a communicator; ranks: 0 if it has enqueued nothing there yet."""

    communicator: str
    rank: int
    ranks: int
    sequence: int
    sends: list[tuple[int, int]] | None
    receives: list[tuple[int, int]] | None


class InFlight(TypedDict):
    """A collective that has begun; exchanges: whether it is sent, with whom, the how many-th."""

    communicator: str
    sequence: int
    operation: str
    bytes: int
    seconds: float
    exchanges: list[tuple[bool, int, int]]


@dataclass(frozen=True)
class Progress(WorkerMessage):
    """The answer to AskProgress: where the rank is on each communicator, the oldest on each stream."""

    type = "progress"
    question: int
    communicators: list[CommunicatorPlace]
    collectives: list[InFlight]


@dataclass(frozen=True)
class NcclError(WorkerMessage):
    """An NCCL call returned an error."""

    type = "nccl_error"
    operation: str
    result: int
    text: str


@dataclass(frozen=True)
class DeviceHeld(WorkerMessage):
    """The host's device calls are held and the device is at rest, `seconds` after the order."""

    type = "held"
    save_id: int
    seconds: float


@dataclass(frozen=True)
class SaveWaits(WorkerMessage):
    """The rank's iteration that made `step` goes on: what it alone knows after that is still to come."""

    type = "save_waits"
    save_id: int
    rank: int
    step: int


@dataclass(frozen=True)
class SaveBegun(WorkerMessage):
    """The rank writes its state after `step`."""

    type = "save_begun"
    save_id: int
    rank: int
    step: int


@dataclass(frozen=True)
class SaveEnded(WorkerMessage):
    """A whole save of the rank's shard after `step` lies in the folder `path`; `bytes` in `seconds`."""

    type = "save_ended"
    save_id: int
    rank: int
    shard: int
    step: int
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PeriodicSave(WorkerMessage):
    """A save of the rank's state after `step`, which nobody ordered, lies in `path`; `seconds` after it.

    of_shard: the shard is in it, too, and not only what this rank alone knows.
    """

    type = "periodic_save"
    rank: int
    shard: int
    step: int
    path: str
    bytes: int
    seconds: float
    of_shard: bool


@dataclass(frozen=True)
class SelfCheck(WorkerMessage):
    """What a save after `step` would hold was restored into copies of the objects, and compared with them.

    tensors, bytes: what was compared. seconds: of another thread; held_up: of the training's. differences:
    clauses. skipped: what was not checked, and why. kept: what jitckpt keeps without having been given it.
    """

    type = "self_check"
    rank: int
    step: int
    tensors: int
    bytes: int
    seconds: float
    held_up: float
    differences: list[Any]
    skipped: list[Any]
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("differences", "skipped", "kept"):
            texts = [shortened(str(text), 500) for text in getattr(self, name)[:8]]
            object.__setattr__(self, name, texts)


@dataclass(frozen=True)
class SaveFailed(WorkerMessage):
    """The rank could not save; long texts are shortened so that the message can always be sent."""

    type = "save_failed"
    save_id: int
    rank: int
    reason: str
    traceback: str = ""

    def __post_init__(self) -> None:
        # A character takes at most 12 bytes in JSON (an escaped surrogate pair).
        object.__setattr__(self, "reason", shortened(self.reason, 1000))
        object.__setattr__(self, "traceback", shortened(self.traceback, 4000))


@dataclass(frozen=True)
class Restored(WorkerMessage):
    """The rank has loaded the state after `step` from the folder `path`, which `source_rank` wrote.

    in_memory: from the memory tier, for this reason (a clause); "" from files.
    """

    type = "restored"
    rank: int
    step: int
    path: str
    source_rank: int
    seconds: float
    in_memory: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_memory", shortened(self.in_memory, 2000))


@dataclass(frozen=True)
class FirstStep(WorkerMessage):
    """The first optimizer step since this worker's start is done on the device."""

    type = "first_step"
    rank: int
    step: int


@dataclass(frozen=True)
class Loaded(WorkerMessage):
    """What the training has loaded by its first step, for warm spares; several messages make one list.

    modules: names to import. environment: pairs of a variable that the training has set, and its value.
    """

    type = "loaded"
    rank: int
    modules: list[str]
    environment: list[list[str]] = field(default_factory=list)

    def problem(self) -> str | None:
        pairs = all(len(pair) == 2 for pair in self.environment)
        return None if pairs else "its environment is no list of names and values"


@dataclass(frozen=True)
class Warning(WorkerMessage):
    """A sentence for the user."""

    type = "warning"
    rank: int
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", shortened(self.text, 5000))


@dataclass(frozen=True)
class AtEnd(WorkerMessage):
    """The worker's script is at its end; its process stays, and can save, until it is needed no more."""

    type = "at_end"
    rank: int


@dataclass(frozen=True)
class Finished(WorkerMessage):
    """The worker has ended its training; it can't save any more. at_exit: its script is at its end."""

    type = "finished"
    rank: int
    step: int
    at_exit: bool = False


@dataclass(frozen=True)
class Raised(WorkerMessage):
    """An exception has come out of the worker's program; its traceback is written, its teardown begins."""

    type = "raised"
    rank: int
    exception: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "exception", shortened(self.exception, 1000))


@dataclass(frozen=True)
class TorchLoaded(WorkerMessage):
    """The worker has imported torch: from now on it tells by which exception or status it ends."""

    type = "torch_loaded"
    rank: int


@dataclass(frozen=True)
class Failing(WorkerMessage):
    """The worker's program ends, before its first step, by what no device or network may have caused."""

    type = "failing"
    rank: int
    mistake: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "mistake", shortened(self.mistake, 1000))


@dataclass(frozen=True)
class WorkRefused(WorkerMessage):
    """The worker's program ends because jitckpt refused something, which another start can't cure."""

    type = "refused"
    rank: int
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", shortened(self.reason, 4000))


@dataclass(frozen=True)
class Fault(WorkerMessage):
    """A rehearsed failure is about to happen. `fault` is its text as it stood in JITCKPT_FAULTS."""

    type = "fault"
    rank: int
    fault: str
    step: int
    phase: str


@dataclass(frozen=True)
class Save(WorkerMessage):
    """Order: hold the device calls, come to rest, save; the agent waits for at most `deadline` seconds."""

    type = "save"
    save_id: int
    reason: str
    deadline: float


@dataclass(frozen=True)
class AskProgress(WorkerMessage):
    """Order: say where you are; the library answers at once, whatever the training does."""

    type = "ask"
    question: int


@dataclass(frozen=True)
class Resume(WorkerMessage):
    """Order: let the held calls go on."""

    type = "resume"


FROM_WORKER = (
    Registered,
    Group,
    Hang,
    Progress,
    NcclError,
    DeviceHeld,
    SaveWaits,
    SaveBegun,
    SaveEnded,
    PeriodicSave,
    SelfCheck,
    SaveFailed,
    Restored,
    FirstStep,
    Loaded,
    Warning,
    AtEnd,
    Finished,
    Raised,
    TorchLoaded,
    Failing,
    WorkRefused,
    Fault,
)
FROM_AGENT = (Save, AskProgress, Resume)
_KINDS: dict[str, type[WorkerMessage]] = checked.by_type((*FROM_WORKER, *FROM_AGENT))


def encode(message: WorkerMessage) -> bytes:
    """Return the message as it is sent. Raises ProtocolError if it can't be."""
    return checked.encoded(message, MAX_BYTES)


def decode(data: bytes) -> WorkerMessage:
    """Return the message that `data` holds. Raises ProtocolError for anything that is none."""
    return checked.decoded(_KINDS, data, MAX_BYTES)
