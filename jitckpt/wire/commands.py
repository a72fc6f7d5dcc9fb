"""What commands and the launcher of a running job tell each other (system/job_socket.py)."""

from dataclasses import dataclass

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked


class ToLauncher(Checked):
    """What a command wants."""


@dataclass(frozen=True)
class Suspend(ToLauncher):
    """The job's processes are to become files in this folder; "": in the job's directory.

    ends: the launchers are to end, so that others can have the job go on.
    """

    type = "suspend"
    to: str
    ends: bool = False


@dataclass(frozen=True)
class ResumeJob(ToLauncher):
    """The job is to go on."""

    type = "resume"


@dataclass(frozen=True)
class Told(Checked):
    """A sentence for who waits; status: with which the command ends then, if it does."""

    type = "told"
    text: str
    status: int | None


TO_LAUNCHER = checked.by_type((Suspend, ResumeJob))
FROM_LAUNCHER = checked.by_type((Told,))
