"""What a rank is told to do in a recovery, in this order; those that others take part in are marked so.

Each rank gets some of these. A list is carried out one after the other; the next recovery's orders end it
wherever it stands.
"""

from dataclasses import dataclass

from jitckpt.transparent.communicators import Creation
from jitckpt.transparent.report import Failure


@dataclass(frozen=True)
class Abort:
    """Abort all communicators and wait until the device is at rest."""


@dataclass(frozen=True)
class FinishStep:
    """Run what is left of step `state`, which needs no other rank; its barrier counts as passed."""

    state: int


@dataclass(frozen=True)
class SaveToHost:
    """Copy parameters and optimizer state, which are those of `state`, to host memory."""

    state: int


@dataclass(frozen=True)
class RestartServer:
    """End the device server, whatever it does, and start a new one with the same addresses."""


@dataclass(frozen=True)
class Reset:
    """Bring streams, events, handles and memory to what they were at `state`; drop what came after.

    What is in the memory stays, as far as the server does.
    """

    state: int


@dataclass(frozen=True)
class LoadFromHost:
    """Copy parameters and optimizer state of `state` back from host memory."""

    state: int


@dataclass(frozen=True)
class MakeCommunicators:
    """Make these communicators anew, one after the other. Each waits for its other callers."""

    creations: tuple[Creation, ...]


@dataclass(frozen=True)
class Export:
    """Send parameters and optimizer state of `state` to rank `to`, which waits for them."""

    to: int
    state: int


@dataclass(frozen=True)
class Import:
    """Take parameters and optimizer state of `state` from rank `source`, which sends them."""

    source: int
    state: int


@dataclass(frozen=True)
class RestoreLocalState:
    """Copy the rank-local state of `state` back from host memory."""

    state: int


@dataclass(frozen=True)
class SkipStep:
    """Pass over all calls up to the end of step `state`, those that the application still makes too."""

    state: int


@dataclass(frozen=True)
class Replay:
    """Run the log from `state` on up to its call number `end`, which is not run any more.

    The collectives in it wait for their other ranks.
    """

    state: int
    end: int


@dataclass(frozen=True)
class DeliverError:
    """Give the application the error of its call instead of running it again."""

    failure: Failure


@dataclass(frozen=True)
class Resume:
    """Let the application's calls go on."""


Order = (
    Abort
    | FinishStep
    | SaveToHost
    | RestartServer
    | Reset
    | LoadFromHost
    | MakeCommunicators
    | Export
    | Import
    | RestoreLocalState
    | SkipStep
    | Replay
    | DeliverError
    | Resume
)
