"""What an agent and the processes beside it tell each other, a line each: who copies saves, and who serves.

objects/copier.py says the first three; web/serve.py is told the last.
"""

from dataclasses import dataclass

from jitckpt.wire import checked
from jitckpt.wire.checked import Checked, Kind

MOST_BYTES = 64 * 1024


class FromCopier(Checked):
    """What the process that copies saves into an object store tells its agent."""


@dataclass(frozen=True)
class CopiedSave(FromCopier):
    """A rank's save is in the store. there: how many of its bytes were there before."""

    type = "copied_save"
    step: int
    rank: int
    kind: str
    bytes: int
    there: int
    seconds: float


@dataclass(frozen=True)
class CopyProblem(FromCopier):
    """Nothing is copied for now, or not this; why, a sentence."""

    type = "copy_problem"
    text: str


@dataclass(frozen=True)
class AllCopied(FromCopier):
    """All is copied, and the process ends."""

    type = "all_copied"


@dataclass(frozen=True)
class JobDirectory(Checked):
    """The job's checkpoint directory is known now."""

    type = "directory"
    path: str


FROM_COPIER: dict[str, type[FromCopier]] = checked.by_type((CopiedSave, CopyProblem, AllCopied))
TO_SERVER: dict[str, type[JobDirectory]] = checked.by_type((JobDirectory,))


def line_of(message: Checked) -> bytes:
    """Return a message as a line. Raises ProtocolError if it is too long."""
    return checked.encoded(message, MOST_BYTES) + b"\n"


def message_of(kinds: dict[str, type[Kind]], line: bytes) -> Kind:
    """Return the message that a line is. Raises ProtocolError if it is none of these kinds."""
    return checked.decoded(kinds, line.rstrip(b"\n"), MOST_BYTES)
