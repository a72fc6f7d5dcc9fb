"""What a rank says of itself once it has been stopped, from which a recovery is decided."""

from dataclasses import dataclass, replace
from typing import Literal

from jitckpt.wire.communicators import FOREVER, Membership

# healthy: it works. suspect: it can be read, but its driver or network may be damaged. empty: a new server
# works, and holds no state yet. changed: it works, and does for the next step, but something in the minibatch
# may have written to the state, which the host has a copy of. lost: nothing can be read from it, or its
# server is dead.
Device = Literal["healthy", "suspect", "empty", "changed", "lost"]


@dataclass(frozen=True)
class FailedCall:
    """A call that failed: its number in the rank's log, and the error's name."""

    call: int
    error: str


@dataclass(frozen=True)
class Report:
    """One rank at rest: the host is held before its next call, the device runs nothing but what hangs.

    A step that the device had begun it has run to its end, unless that failed. What an abort sets free
    afterwards is not counted: docs/how-it-works/transparent.md says what it all has to keep to.

    "The state k" is that after k optimizer steps: parameters and optimizer state, which replicas have in
    common, and the rank-local state, which they have not. Minibatch k + 1 leads from the state k to k + 1.

    shard: what it holds of one replica. begun, ended: the newest optimizer step that the device has begun
    and ended. ready: the newest whose gradients it has completed. kept_from, kept_to: the host has the
    rank-local states from kept_from to kept_to, and the log of all calls since the state kept_from
    (kept_from > kept_to: none). images: those of these states that have parameters and optimizer state, too.
    host_copies: the states of which these are in host memory for other ranks as well. host_ended: the newest
    step of which the host has made all calls. log_end: the calls in the log; a number that only grows.
    failure: the call that failed here; failure_before: the one for which the last recovery was made.
    communicators: all that live in one of the states that are kept. outgrown: the state since which the
    calls are more than the log holds, so that nothing is kept.
    """

    rank: int
    shard: int = 0
    device: Device = "healthy"
    begun: int = 0
    ended: int = 0
    ready: int = 0
    kept_from: int = 0
    kept_to: int = 0
    images: frozenset[int] = frozenset()
    host_copies: frozenset[int] = frozenset()
    host_ended: int = 0
    log_end: int = 0
    failure: FailedCall | None = None
    failure_before: FailedCall | None = None
    worker_alive: bool = True
    communicators: tuple[Membership, ...] = ()
    outgrown: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ended <= self.begun <= self.ready <= self.ended + 1:
            raise ValueError(
                f"Rank {self.rank} can't have ended step {self.ended}, begun {self.begun} and be ready for "
                f"{self.ready}."
            )

    @property
    def phase(self) -> Literal["forward or backward", "optimizer"]:
        """Where in its minibatch the device is."""
        return "optimizer" if self.begun > self.ended else "forward or backward"

    @property
    def failed_again(self) -> bool:
        """Whether the replay failed at the same call as the first execution: the program's own fault."""
        return self.failure is not None and self.failure == self.failure_before

    def keeps(self, state: int) -> bool:
        """Whether the host has what this rank alone knows of that state, and the calls since.

        The log goes on behind the step, so all calls of the step have to be in it.
        """
        return self.kept_from <= state <= min(self.kept_to, self.host_ended)

    def moved(self, by: int) -> "Report":
        """Return the same of a rank that numbers its states differently."""
        return replace(
            self,
            begun=self.begun + by,
            ended=self.ended + by,
            ready=self.ready + by,
            kept_from=self.kept_from + by,
            kept_to=self.kept_to + by,
            host_ended=self.host_ended + by,
            images=frozenset(state + by for state in self.images),
            host_copies=frozenset(state + by for state in self.host_copies),
            communicators=tuple(_moved(place, by) for place in self.communicators),
        )


def _moved(place: Membership, by: int) -> Membership:
    return replace(
        place,
        since=place.since + by,
        until=place.until if place.until == FOREVER else place.until + by,
        counts=tuple(replace(count, state=count.state + by) for count in place.counts),
    )
