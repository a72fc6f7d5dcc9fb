"""What variables were as an epoch began, and as the earlier loops of it, and over epochs, ended.

A restart goes through the epoch again, and through the loops that were done without an iteration. What its
top reads is as it was there; what the code behind a loop reads as that had left it, and no later one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, to_json

PART = "earlier_loops"
TOP = "top"  # of an epoch
OVER_EPOCHS = "epochs "  # and the number of such a loop
MOST_BYTES = 1_000_000
TOO_MUCH = (
    "What the script's variables were at an epoch's top and behind each loop has grown beyond "
    f"{MOST_BYTES // 1000} kB. After a failure further on in that epoch the code there finds them as the "
    "script sets them before it. Give job.epochs more and shorter epochs."
)

Values = Mapping[str, Mapping[str, Any]]  # by places and names


def loop_of(begun: Sequence[int]) -> str:
    """Return what tells a loop from others. begun: over batches, and over steps, in that epoch by then."""
    return ".".join(map(str, begun))


def within(loop: str, other: str) -> str:
    """Return what such a loop is called that is counted with others as one over epochs."""
    return f"{loop} {other}"


class EarlierLoops:
    """Told as a loop ends; loops are known by their numbers in the epoch, as text, or by these words."""

    def __init__(self) -> None:
        self._told: dict[str, Values] = {}
        self._captured = self._given = Encoded({}, {})

    def note(self, loop: str, values: Values) -> str | None:
        """Keep what there is behind a loop; return a sentence if that is too much."""
        told = self._told | {loop: values}
        captured = tree_codec.encode(told, PART)
        size = len(to_json(captured.tree)) + sum(one.nbytes for one in captured.tensors.values())
        if size > MOST_BYTES:
            return TOO_MUCH
        self._told, self._captured = told, captured
        return None

    def keep_within(self, loop: str) -> None:
        """Keep what was noted of the epoch's loops beyond it, as of this loop over epochs."""
        kept = {
            (one if one.startswith(OVER_EPOCHS) else within(loop, one)): of
            for one, of in self._told.items()
            if one != TOP
        }
        if kept.keys() != self._told.keys():
            self._told, self._captured = kept, tree_codec.encode(kept, PART)

    def begin_epoch(self) -> None:
        """No loop of the new epoch has ended."""
        if any(not loop.startswith(OVER_EPOCHS) for loop in self._told):
            self._told = {loop: of for loop, of in self._told.items() if loop.startswith(OVER_EPOCHS)}
            self._captured = tree_codec.encode(self._told, PART)

    def of(self, loop: str) -> Values:
        """Return what was noted of a loop of this epoch."""
        return self._told.get(loop, {})

    def capture(self) -> Encoded:
        """Return it all; the same object while nothing is new."""
        self._given = self._captured
        return self._given

    def is_same(self) -> bool:
        """Whether `capture` would return the same object."""
        return self._captured is self._given

    def restore(self, saved: Mapping[str, Values] | None) -> None:
        """Know again what `capture` returned, decoded."""
        self._told = {**(saved or {})}
        self._captured = tree_codec.encode(self._told, PART)
