"""What an agent tells its guardian (agent/processes/guardian.py)."""

from dataclasses import dataclass

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked


class ToGuardian(Checked):
    """What the agent tells its guardian."""


@dataclass(frozen=True)
class GuardWorker(ToGuardian):
    """A worker is to be ended with the agent; a pidfd of it comes with this. registered: as below."""

    type = "guard"
    pid: int
    registered: bool = False


@dataclass(frozen=True)
class SavesItself(ToGuardian):
    """The worker saves by itself from now on, should the agent be killed, and gets the time for it."""

    type = "registered"
    pid: int


@dataclass(frozen=True)
class Forget(ToGuardian):
    """The worker has ended and was waited for."""

    type = "forget"
    pid: int


@dataclass(frozen=True)
class Locks(ToGuardian):
    """Connections of a worker are about to be locked; these locks are there already. None: it has ended."""

    type = "locks"
    names: list[str] | None


@dataclass(frozen=True)
class Images(ToGuardian):
    """Workers are images in this folder, which are of no use without the agent. "": none are."""

    type = "images"
    folder: str


KINDS = checked.by_type((GuardWorker, SavesItself, Forget, Locks, Images))
