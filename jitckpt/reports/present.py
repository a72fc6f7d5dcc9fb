"""A job as it is now: where its ranks are, what protects it, and where its time went (by job_model.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

# What a job's time goes into, and how people call it. What is not useful was lost to that cause.
USEFUL = "useful"
CAUSES = {
    USEFUL: "useful steps",
    "starting": "starting",
    "died": "a rank died",
    "hang": "a hang",
    "nccl_error": "an NCCL error",
    "host": "a lost host",
    "hosts": "hosts that were taken in",
    "signal": "a signal",
    "device": "a device",
    "late": "waiting for late ranks",
    "done_again": "minibatches done again",
    "ending": "ending",
}

IN_PLACE = "device"  # the cause of recoveries in the same processes

# What a recovery with a restart goes through, job-wide; the names are those of the timeline's picture.
PHASES = ("detect", "save", "end", "restart", "restore", "first step")


@dataclass(frozen=True)
class AgentsProgress:
    """What the agents tell beside the events, at this wall time: the newest step of each rank.

    memory_states: how far the snapshots of healthy ranks are (decisions/memory_state.py).
    """

    time: float
    restart: int
    steps: Mapping[int, int]
    step_seconds: float | None = None
    memory_states: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankNow:
    """state: starting, loading, training, late, held, saving, saved, failed, ended or done.

    shard: None before the rank has registered. late: seconds that the others have waited for it.
    memory_state: for the memory tier (decisions/memory_state.py); "" as long as that has nothing of it.
    """

    rank: int
    state: str
    step: int | None
    shard: int | None
    late: float = 0.0
    memory_state: str = ""


@dataclass(frozen=True)
class ShardNow:
    """A part of the model that each of `ranks` has a copy of; living: those that have it now."""

    number: int
    ranks: tuple[int, ...]
    living: tuple[int, ...]

    @property
    def protected(self) -> bool:
        """Whether any one rank may be lost, and its state is still there after the newest step."""
        return len(self.living) > 1


@dataclass(frozen=True)
class RecoveryNow:
    """A failure and what follows. Times in seconds; found: wall time; at: since the job's start.

    scope: restart, or in_place. tier: where the state came from: just_in_time, earlier_save, memory_tier,
    in_memory (in place), or nothing; unknown while it has not come to that. phases: of the slowest rank.
    seconds: until all ranks trained again. outcome: under way, recovered, given up (in place; then a restart
    follows), ended.
    """

    scope: str
    tier: str
    cause: str
    text: str
    fault: str | None
    ranks: tuple[int, ...]
    found: float
    at: float
    phases: Mapping[str, float]
    saved_step: int | None
    step: int | None
    redone: int | None
    seconds: float | None
    outcome: str


@dataclass(frozen=True)
class HangReport:
    """Where it stands who waited for whom."""

    at: float
    path: str
    text: str


@dataclass(frozen=True)
class Suspect:
    """A device on which ranks have failed twice."""

    device: str
    host: str
    rank: int


@dataclass(frozen=True)
class MemoryHost:
    """A host of the memory tier. kept_by: the hosts, by place in the list, that have its ranks' state.

    in_parts_on: those that have it all together, where no other has all of it.
    """

    host: str
    ranks: tuple[int, ...]
    kept_by: tuple[int, ...]
    in_parts_on: tuple[int, ...] = ()


@dataclass(frozen=True)
class Present:
    """What is known of a job. spent: seconds by cause; their sum is `seconds`, all since `started`.

    segments: the same in its order: cause, begin, end, in seconds since the start (what was done again is not
    told apart there). state: starting, training, late, recovering, ending, or how it ended. safe_step: the
    newest that lies whole on the disk; None if none does. memory_step: the newest that the memory
    tier has of all ranks; None without one. memory_bytes: what the first host's memory has of it.
    memory_copied, memory_minibatch: as the newest event memory_safe has them. protected: the share of the
    ranks that have a living replica, or whose state the memory tier has. in_place: whether failures of
    devices are recovered from in the same processes (transparent mode).
    """

    started: float
    state: str
    outcome: str | None
    restart: int
    max_restarts: int
    world_size: int
    ranks: tuple[RankNow, ...]
    shards: tuple[ShardNow, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    step: int | None
    step_seconds: float | None
    safe_step: int | None
    memory_step: int | None
    memory_hosts: tuple[MemoryHost, ...]
    protected: float
    in_place: bool
    seconds: float
    spent: Mapping[str, float]
    segments: tuple[tuple[str, float, float], ...]
    recoveries: tuple[RecoveryNow, ...]
    repeated: int
    suspects: tuple[Suspect, ...]
    hang_reports: tuple[HangReport, ...]
    warnings: tuple[str, ...]
    checkpoint_dir: str
    fingerprint: str
    versions: Mapping[str, str]
    log_bytes: int
    image_bytes: int
    memory_bytes: int
    memory_copied: Mapping[str, int] = field(default_factory=dict)
    memory_minibatch: Mapping[str, float] = field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        """The useful share of the time; None where none has passed."""
        return self.spent[USEFUL] / self.seconds if self.seconds > 0 else None

    @property
    def late(self) -> tuple[RankNow, ...]:
        """The ranks that others wait for."""
        return tuple(rank for rank in self.ranks if rank.state == "late")


def with_cause(spent: Mapping[str, float], least: float = 0.0) -> list[tuple[str, float]]:
    """Return what took more than so many seconds, the useful time first, then the greatest loss."""
    found = [(cause, seconds) for cause, seconds in spent.items() if seconds > least]
    return sorted(found, key=lambda one: (one[0] != USEFUL, -one[1]))


def shown_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks in a few words."""
    shown = ", ".join(map(str, islice(ranks, most)))
    return f"{shown} and {len(ranks) - most} more" if len(ranks) > most else shown
