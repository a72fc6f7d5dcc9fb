"""What variables were as the earlier loops of an epoch ended.

A restart goes through the epoch again, and through the loops that were done without an iteration; what the
code behind them reads is as the loop had left it, and not as a later one has.
"""

from collections.abc import Mapping
from typing import Any

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded, to_json

PART = "earlier_loops"
MOST_BYTES = 1_000_000  # of all loops of an epoch
TOO_MUCH = (
    "What the script's variables were behind each loop over minibatches of one epoch has grown beyond "
    f"{MOST_BYTES // 1000} kB. After a failure in a later loop of that epoch the code behind this one finds "
    "them as the script sets them before it. Give job.epochs more and shorter epochs."
)

Values = Mapping[str, Mapping[str, Any]]  # by places and names


class EarlierLoops:
    """Told as a loop ends; loops are known by their numbers in the epoch, as text."""

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

    def begin_epoch(self) -> None:
        """No loop of the new epoch has ended."""
        if self._told:
            self._told = {}
            self._captured = Encoded({}, {})

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
