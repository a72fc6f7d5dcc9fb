"""By which exceptions the job's loops over epochs and over steps were left, and that they are raised again.

Those of loops over batches are kept with their passes.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

from jitckpt._seen import Exit
from jitckpt.data import exits
from jitckpt.encoding.tree_codec import Json

_Given = TypeVar("_Given")

OVER_EPOCHS, OVER_STEPS = "epochs", "steps"
DROPPED = (
    "A loop over job.epochs or job.steps was dropped before its end, and not left with break: by an "
    "exception that the script has caught outside of it, or with a progress bar around it. A restart further "
    "on comes out at the loop's end, as if it had run to its end: it does what stands there, and not what "
    "followed the exception. Leave a loop with break, and have a variable say why, or by an exception of a "
    "class of your own that an `except` of that class catches."
)
PASSED_BY = (
    "The script has left a loop over job.steps or job.batches that no loop over job.epochs is around by an "
    "exception. A restart in the loop over job.epochs that begins now passes by the former without it, and "
    "does what stands at its end. Leave it by `break`, and have a variable say what is to follow."
)


class LoopExits:
    """What is told of exceptions, of the loops over epochs and of those over steps in this epoch."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._newest = b""
        self._is_dropped = False  # a loop, by what nobody tells: perhaps a failure
        self.told: dict[str, bytes] = {}  # by loops; another object whenever it is another

    def seen(self, loop: Iterator[_Given]) -> Iterator[_Given]:
        """Return an iterator as that of a loop, whose close can ask by what exception it is left."""
        if self._is_dropped:
            self._is_dropped = False
            self._warn(DROPPED)  # it was no failure
        return Exit(self._goes, loop)

    def _goes(self, exception: BaseException | None) -> None:
        self._newest = exits.told(exception, sys._getframe().f_back)

    def newest(self, leaves: FrameType | None) -> bytes:
        """Return, as the iterator of a loop is closed, what tells of the script's exception; b"" if none.

        leaves: who leaves the loop without one.
        """
        newest, self._newest = self._newest, b""
        self._is_dropped |= not newest and leaves is None
        return newest

    def left(self, kind: str, loop: int, exit: bytes) -> None:
        """It has left the loop of that number by the exception, or without one."""
        kept = {name: told for name, told in self.told.items() if name != f"{kind}.{loop}"}
        self.told = {**kept, f"{kind}.{loop}": exit} if exit else kept

    def leave_again(self, kind: str, loop: int) -> None:
        """A restart is at that loop's end: raise the exception by which it was left, if there was one."""
        self.raise_again(self.told.get(f"{kind}.{loop}", b""))

    def raise_again(self, exit: bytes) -> None:
        if exit:
            if (exception := exits.made(exit)) is not None:
                raise exception
            self._warn(exits.NOWHERE)

    def epoch_begins(self) -> None:
        """Loops over steps are counted anew."""
        self.told = {name: exit for name, exit in self.told.items() if name.startswith(OVER_EPOCHS)}

    def are_passed_by(self, of_passes: Iterable[bytes]) -> None:
        """A loop over epochs begins behind others that none is around. of_passes: exits over batches."""
        if any(of_passes) or any(name.startswith(OVER_STEPS) for name in self.told):
            self._warn(PASSED_BY)

    def tree(self) -> Json:
        return [[name, {"$tensor": f"loop.exit.{name}"}] for name in self.told]

    def pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield what the tree's tensors are of."""
        for name, exit in self.told.items():
            yield f"loop.exit.{name}", exit

    def restore(self, loop: Mapping[str, Any]) -> None:
        self.told = _told_in(loop)

    def take(self, loop: Mapping[str, Any], number: int) -> None:
        """Take over what a replica tells of the loop over steps of that number."""
        self.left(OVER_STEPS, number, _told_in(loop).get(f"{OVER_STEPS}.{number}", b""))


def exit_of(saved: Mapping[str, Any]) -> bytes:
    """Return what was saved with a pass, or with the pass of an earlier version."""
    return saved["exit"].numpy().tobytes() if "exit" in saved else b""


def _told_in(loop: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: exit.numpy().tobytes() for name, exit in loop.get("exits", ())}
