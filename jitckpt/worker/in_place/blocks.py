"""Whether a minibatch's log, run again, gives the same; and what has to be put back before it: learned.

A validation compares the device's memory, block by block, at three times: as the minibatch began (the image),
at a place before its optimizer step, and at that place again after the image was put back, what is tried (it
has changed, and an image might do without it) was overwritten, and the log was run again. All else is put
back: a batch drawn in the minibatch before may be indices, of which overwritten ones would break the device.
If the last two are the same, nothing of what was overwritten is needed. If they differ, what was tried may be
missing: it is learned, and the validation made again. If nothing is left to learn, the log is not all that
the device's results depend on, and transparent mode is switched off.

So a block is one of: unchanged (constants; parameters and optimizer state, which the step changes); the
shadow, which changes in the minibatch and is needed for it; and what is written before it is read.
"""

from dataclasses import dataclass

from torch import Tensor

MOST_ROUNDS = 3  # in which what differs is learned; then all that changes is put back


@dataclass(frozen=True)
class Seen:
    """What one validation has seen, each of type bool and shape (blocks,).

    changed: from the minibatch's start to its place before the step. differing: from there to the same place
    after the log was run again.
    """

    changed: Tensor
    differing: Tensor


@dataclass(frozen=True)
class Valid:
    """The log is all there is; `shadow` has the blocks that a recovery needs of those that change."""

    shadow: Tensor


@dataclass(frozen=True)
class Again:
    """There was something to learn: validate once more, with `shadow` put back."""

    shadow: Tensor


@dataclass(frozen=True)
class SwitchOff:
    """No transparent recovery would be right: that block differs, though nothing was overwritten."""

    block: int


def judge(seen: Seen, shadow: Tensor, rounds: int = 1) -> Valid | Again | SwitchOff:
    """Return what follows from a validation in which `shadow` was put back, and what else changed was not.

    rounds: how often the log has been run again. Where other ranks have something to learn, a SwitchOff may
    come from what they lacked.
    """
    if not seen.differing.any():
        return Valid(shadow)
    unknown = seen.changed & ~shadow
    if not unknown.any():
        return SwitchOff(int(seen.differing.nonzero()[0]))
    found = unknown & seen.differing
    if rounds >= MOST_ROUNDS or not found.any():
        found = unknown  # what is read, and then overwritten with the same, does not differ itself
    return Again(shadow | found)
