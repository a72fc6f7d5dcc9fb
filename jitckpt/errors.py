"""Every error that jitckpt raises: its text is a sentence that says what is wrong, where, and what to do."""

from typing import ClassVar


class JitckptError(Exception):
    """The common base; jitckpt raises nothing else on purpose, apart from what Python itself raises.

    restart_helps: whether the same program may come further when it is started again. Where it is not, the
    agent ends the job once such an error has ended a rank.
    """

    restart_helps: ClassVar[bool] = True


class CheckpointError(JitckptError):
    """The checkpoint directory can't be used, or holds saves of which none fits this job."""

    restart_helps = False


class LeftToScriptError(JitckptError):
    """The script has brought itself back by means of its own, which no save of jitckpt's fits."""


class RecoveryError(JitckptError):
    """What a recovery in place has led to can't be relied on; a restart goes back to before it."""


class SaveError(JitckptError):
    """A save can't be written, or what lies on the disk is not a whole save."""


class TreeError(JitckptError):
    """A value is of a kind that can't be written without pickle, or a tree on disk is malformed."""

    restart_helps = False


class NativeError(JitckptError):
    """The preloaded library refused a call or does not fit this version of jitckpt."""


class HostsError(JitckptError):
    """The hosts of a job can't work together (any more)."""


class HostsMissing(HostsError):
    """Too few hosts have come together; the same command goes on when there are enough."""


class NoProgress(HostsError):
    """The starts of a job on several hosts come to one step and fail alike there."""


class HostUnfit(JitckptError):
    """This host's health check fails: the job goes on without it."""


class HostBeginsAgain(HostUnfit):
    """This host's launcher can't go on from what it has fetched; another one in its place can."""


class NotNeeded(JitckptError):
    """A host stood by, and the job goes on or has ended without it."""


class JobEnded(NotNeeded):
    """A host stood by, and the others have ended, as far as can be seen where they meet."""

    def __init__(self) -> None:
        super().__init__("The job has ended; this host stood by and was not needed.")


class JobSuspended(JitckptError):
    """All ranks are in files, on all hosts, and the job ends until it is resumed."""


class RehearsedFailure(JitckptError):
    """The exception that `--fault '... kind=exception'` raises in the training thread."""
