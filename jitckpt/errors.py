"""Every error that jitckpt raises: its text is a sentence that says what is wrong, where, and what to do."""


class JitckptError(Exception):
    """The common base; jitckpt raises nothing else on purpose, apart from what Python itself raises."""


class CheckpointError(JitckptError):
    """The checkpoint directory can't be used, or holds saves of which none fits this job."""


class SaveError(JitckptError):
    """A save can't be written, or what lies on the disk is not a whole save."""


class TreeError(JitckptError):
    """A value is of a kind that can't be written without pickle, or a tree on disk is malformed."""


class NativeError(JitckptError):
    """The preloaded library refused a call or does not fit this version of jitckpt."""


class HostsError(JitckptError):
    """The hosts of a job can't work together (any more)."""


class NotNeeded(JitckptError):
    """A host stood by, and the job has ended without it."""


class RehearsedFailure(JitckptError):
    """The exception that `--fault '... kind=exception'` raises in the training thread."""
