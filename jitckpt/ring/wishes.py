"""What an agent writes into its ranks' rings: after which step it wants a save, that a rank may end, and
that a periodic save is whole.
"""

import os
from collections.abc import Sequence

from jitckpt.ring.format import MAY_END, SAVED_WHOLE, WANTED, WORD
from jitckpt.ring.local_state import step_of

MARGIN = 3  # steps until a save that is asked for: all ranks have to hear of it before


def want_save(descriptors: Sequence[int], margin: int = MARGIN) -> int | None:
    """Ask the ranks of all these rings to save after the same step, `margin` from now; return that step.

    None if some rank has made no step yet. Raises SaveError if a ring is damaged.
    """
    newest = [step_of(descriptor) for descriptor in descriptors]
    if not newest or 0 in newest:
        return None
    step = max(newest) + margin
    want_save_after(descriptors, step)
    return step


def want_save_after(descriptors: Sequence[int], step: int) -> None:
    """Ask the ranks of all these rings to save after this step, if they have not come to it yet."""
    for descriptor in descriptors:
        os.pwrite(descriptor, WORD.pack(step), WANTED)


def let_end(descriptor: int) -> None:
    """Tell the rank of this ring that it may end, once its script is at its end."""
    os.pwrite(descriptor, WORD.pack(1), MAY_END)


def may_end(descriptor: int) -> bool:
    """Return whether the rank of this ring may end, once its script is at its end."""
    return any(os.pread(descriptor, WORD.size, MAY_END))


def note_saved_whole(descriptors: Sequence[int]) -> None:
    """Tell the ranks of all these rings that a periodic save is whole: there is a file to go back to."""
    for descriptor in descriptors:
        os.pwrite(descriptor, WORD.pack(1), SAVED_WHOLE)


def is_saved_whole(descriptor: int) -> bool:
    """Return whether a periodic save of the job of this ring is whole, as far as the agent has heard."""
    return any(os.pread(descriptor, WORD.size, SAVED_WHOLE))
