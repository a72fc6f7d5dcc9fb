"""What a rank is told to do in a recovery, in this order; those that others take part in are marked so.

Each rank gets some of these. A list is carried out one after the other; the next recovery's orders end it
wherever it stands.
"""

from dataclasses import dataclass

from jitckpt.decisions.transparent.communicators import Creation
from jitckpt.decisions.transparent.report import FailedCall


@dataclass(frozen=True)
class Abort:
    """Abort all communicators and wait until the device is at rest."""


@dataclass(frozen=True)
class FinishStep:
    """Run step `state`, which needs no other rank; its barrier counts as passed."""

    state: int


@dataclass(frozen=True)
class SaveToHost:
    """Have parameters and optimizer state of `state` in host memory: copy them unless they are there.

    Those of a whole image are there for the rank itself.
    """

    state: int


@dataclass(frozen=True)
class RestartServer:
    """Have a device server that holds nothing, with the same addresses.

    may_stay: the one that there is may drop all that it has, if it still can; else it is ended, whatever it
    does, and a new one is started.
    """

    may_stay: bool = False


@dataclass(frozen=True)
class Reset:
    """Bring streams, events, handles and memory to what they were at `state`; drop what came after.

    What is in the memory stays, as far as the server does.
    """

    state: int


@dataclass(frozen=True)
class LoadFromHost:
    """Copy parameters and optimizer state of `state` to the device from the host memory of rank `of`.

    If that is another rank, it has them there before its own orders go on (SaveToHost).
    """

    state: int
    of: int


@dataclass(frozen=True)
class MakeCommunicators:
    """Make these communicators anew, one after the other. Each waits for its other callers."""

    creations: tuple[Creation, ...]


@dataclass(frozen=True)
class RestoreLocalState:
    """Copy the rank-local state of `state` back from host memory."""

    state: int


@dataclass(frozen=True)
class RunLog:
    """Run the log from the end of step `state` on up to its call number `end`, which is not run any more.

    The collectives in it wait for their other ranks.
    """

    state: int
    end: int


@dataclass(frozen=True)
class DeliverError:
    """Give the application the error of its call instead of running it again."""

    failure: FailedCall


@dataclass(frozen=True)
class LetGoOn:
    """Let the application's calls go on."""


Order = (
    Abort
    | FinishStep
    | SaveToHost
    | RestartServer
    | Reset
    | LoadFromHost
    | MakeCommunicators
    | RestoreLocalState
    | RunLog
    | DeliverError
    | LetGoOn
)
