"""The folder of a save, as a script gets it."""

from pathlib import PosixPath


class CheckpointPath(PosixPath):
    """A Path. Because scripts say `path + "/model.pt"`, too, that works as with a text, and gives one."""

    __slots__ = ()

    def __add__(self, end: str) -> str:
        return str(self) + end if isinstance(end, str) else NotImplemented
