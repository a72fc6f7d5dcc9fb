"""What the script does outside of its loops: before the first one of an epoch, and between two of them.

A restart in a later loop does it again. So it draws the random numbers that it drew, and what it computes
there is compared.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from jitckpt.data import generators

MOST_DRAWN = 16  # stretches whose generators are kept: without job.epochs there is no end of them
TOO_MANY = (
    f"More than {MOST_DRAWN} times in one epoch the script has drawn random numbers outside of its loops "
    "over batches or steps. After a failure the first of these draw others, and what they make may differ. "
    "Give each pass an epoch of its own, `for epoch in job.epochs(n):`, in the place of a loop over range(n)."
)

PASSED_BY = (
    "The restart has not come to the loop over job.batches or job.steps in which the job was: what the "
    "script decides before it in an epoch (an early stop by an evaluation between two loops) came out "
    "otherwise with the parameters of the middle. This run differs from an undisturbed one. Give each pass "
    "over the batches an epoch of its own, `for epoch in job.epochs(n):`, where nothing is decided before it."
)


class Head(Protocol):
    """Looks at what the script computes in a stretch (worker/epoch_head.py)."""

    def epoch_begins(self, frame: FrameType) -> None: ...
    def begins(self) -> None: ...
    def digests(self) -> Mapping[str, str]: ...
    def compare(self, before: Mapping[str, str], now: Mapping[str, str]) -> None: ...


@dataclass
class Stretch:
    """One that has ended. drawn_from: all generators as it began, packed, if it has drawn something.

    said: digests of what it has computed, as they are kept.
    """

    drawn_from: bytes = b""
    said: bytes = b""


def saved_stretches(loop: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return those that a saved loop tells of, decoded.

    A version before told of the one before an epoch's first pass alone, once that had begun.
    """
    if "between" in loop:
        return loop["between"]  # type: ignore[no-any-return]
    nothing = torch.zeros(0, dtype=torch.uint8, device="cpu")
    head = {"drawn": loop.get("epoch", nothing), "said": loop.get("head", nothing)}
    return [head] if len(loop["passes"]) else []


class BetweenLoops:
    """The stretches of one epoch; of a restored one those are known that are to be gone through again."""

    def __init__(self, head: Head | None, warn: Callable[[str], None]) -> None:
        self._head, self._warn = head, warn
        self._number = 0  # of the one that is open, or of the next one
        self._begun: bytes | None = None  # all generators as the one that is open began
        self._compares = True
        self._said_too_many = False
        self.ended: list[Stretch] = []

    def begin_epoch(self, *, tells: bool = False, stays_open: bool = False) -> None:
        """Nothing is known of the new epoch. tells: say so unless all that was saved was gone through.

        stays_open: the stretch that is open belongs to it.
        """
        if tells and self._number < len(self.ended):
            self._warn(PASSED_BY)
        self._number, self._begun, self.ended = 0, self._begun if stays_open else None, []

    def begins(self, frame: FrameType | None = None) -> None:
        """A stretch begins. frame: which is given an epoch."""
        if self._head is not None:
            if frame is not None:
                self._head.epoch_begins(frame)
            self._head.begins()
        if self._number < len(self.ended) and (drawn_from := self.ended[self._number].drawn_from):
            generators.put_all(drawn_from)
        self._begun = generators.all_packed()

    def began_with(self, states: bytes) -> None:
        """The one that is open has begun with the generators so, before it was known of."""
        self._begun = states

    def ends(self) -> None:
        """A loop begins: perhaps after a stretch, perhaps in another loop."""
        if self._begun is None:
            return
        number, self._number = self._number, self._number + 1
        begun, self._begun = self._begun, None
        now = {} if self._head is None else self._head.digests()
        if number < len(self.ended):
            if self._head is not None and self._compares and (said := self.ended[number].said):
                self._head.compare(json.loads(said), now)
            return
        drawn_from = b"" if begun == generators.all_packed() else begun
        self.ended.append(Stretch(drawn_from, json.dumps(now).encode() if now else b""))
        if len(self.ended) > MOST_DRAWN and self.ended[-1 - MOST_DRAWN].drawn_from:
            self.ended[-1 - MOST_DRAWN].drawn_from = b""
            if not self._said_too_many:
                self._said_too_many = True
                self._warn(TOO_MANY)

    def restore(self, saved: Iterable[Mapping[str, Any]], *, of_others: bool) -> None:
        """Go through those again that were saved. of_others: as other ranks, so what is computed is other."""
        self.begin_epoch()
        self._compares = not of_others
        self.ended = [Stretch(*(one[name].numpy().tobytes() for name in ("drawn", "said"))) for one in saved]
