"""What variables were as the earlier loops of an epoch ended.

A restart goes through the epoch again, and through the loops that were done without an iteration; what the
code behind them reads is as the loop had left it, and not as a later one has.
"""

from collections.abc import Mapping
from typing import Any

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded

PART = "earlier_loops"
MOST_LOOPS = 256  # of an epoch
TOO_MANY = (
    f"More than {MOST_LOOPS} loops over minibatches in one epoch set what the code behind them reads. After "
    "a failure those that came later have no values there. Give job.epochs more and shorter epochs."
)

Values = Mapping[str, Mapping[str, Any]]  # by places and names


class EarlierLoops:
    """Told as a loop ends; loops are known by their numbers in the epoch, as text."""

    def __init__(self) -> None:
        self._told: dict[str, Values] = {}
        self._captured = self._given = Encoded({}, {})

    def note(self, loop: str, values: Values) -> str | None:
        """Keep what is read behind a loop; return, once, a sentence if it is one too many."""
        if loop not in self._told and len(self._told) >= MOST_LOOPS:
            return TOO_MANY
        self._told[loop] = values
        self._captured = tree_codec.encode(self._told, PART)
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
