"""The ranks of a job and its coordinator, as they are while they agree on a recovery or on a validation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jitckpt.decisions.transparent.coordination import Coordinator, Participant
from jitckpt.decisions.transparent.report import FailedCall
from jitckpt.wire.proxy_messages import HostCopy, Id, ToProxy

MICROSECONDS = 1e6
NOT_YET = "it has not used its device yet"


class Note(Protocol):
    """Takes an event of the job, with what it says."""

    def __call__(self, event: str, **details: object) -> None: ...


class Tell(Protocol):
    """Sends a rank's proxy an order, if there is one."""

    def __call__(self, rank: int, order: ToProxy, /) -> None: ...


@dataclass
class RankInRecovery:
    """What is known of one rank. told: the last order; due: by when it is carried out.

    shard: whom it shares its state with. gone: why it can't take part in a recovery, a clause. copy: of its
    state, for this recovery. failure: the one of the last recovery. memory: the most bytes of its log and of
    its images.
    """

    participant: Participant
    shard: int
    gone: str = NOT_YET
    told: ToProxy | None = None
    asked_at: float = 0.0
    due: float | None = None
    ids: tuple[Id, ...] | None = None
    copy: tuple[HostCopy, ...] = ()
    failure: FailedCall | None = None
    memory: tuple[int, int] = (0, 0)


class JobInRecovery:
    """The state machines of coordination.py, each put in the place of the one before."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.coordinator = Coordinator(tuple(ranks))
        self.ranks = {rank: RankInRecovery(Participant(rank), shard=rank) for rank in ranks}
        # What need not be looked at again: a job may have ten thousand ranks, each with much to say.
        self.news: set[int] = set()  # who has said something, or is gone

    def fails(self, rank: int) -> None:
        """A rank can't go on as it is."""
        self.ranks[rank].participant = self.ranks[rank].participant.failed()
        self.news.add(rank)
