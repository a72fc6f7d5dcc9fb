"""When a job may be suspended, and after which of its steps: the words of `jitckpt suspend` and `resume`.

All ranks wait behind the same optimizer step: there each has a whole image of its state, or its state on a
device that is at rest, and few calls that are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jitckpt.decisions.transparent import validation

MARGIN = 3  # steps until the one that is asked for: all ranks have to hear of it before
MOST_APART = 2  # steps; ranks that are further apart number them differently

# asked: the ranks are to wait behind `step`. resuming: their processes are there again, but not all run.
Phase = Literal["running", "asked", "suspended", "resuming"]


@dataclass(frozen=True)
class CannotSuspend:
    """What was asked for can't be done, and nothing has changed; a sentence."""

    reason: str


@dataclass(frozen=True)
class Suspension:
    """Of one start of a job's ranks."""

    phase: Phase = "running"
    step: int = 0

    def ask(self, steps: Sequence[int]) -> "Suspension | CannotSuspend":
        """Return what it is once somebody wants it; steps: the newest that each rank has begun."""
        match self.phase:
            case "asked":
                return CannotSuspend(f"It is to be suspended already, after step {self.step}.")
            case "suspended" | "resuming":
                return CannotSuspend(f"It is {'' if self.phase == 'resuming' else 'already '}{self.phase}.")
        step = meeting(steps)
        return step if isinstance(step, CannotSuspend) else replace(self, phase="asked", step=step)

    def resume(self, taken: Sequence[str] = ()) -> "Suspension | CannotSuspend":
        """Return what it is once somebody wants it to go on; taken: whose numbers are not free, clauses."""
        if self.phase != "suspended":
            return CannotSuspend("It is not suspended.")
        if taken:
            return CannotSuspend(
                f"It stays suspended: {taken[0]}, a number that one of its processes has to have again. "
                "Resume it once that has ended."
            )
        return replace(self, phase="resuming")

    def suspended(self) -> "Suspension":
        """All processes are images."""
        return replace(self, phase="suspended")

    def over(self) -> "Suspension":
        """It is not to be suspended any more, or all ranks run again."""
        return Suspension()


def meeting(steps: Sequence[int], meanwhile: int = 0) -> int | CannotSuspend:
    """Return behind which step all ranks can wait that have begun these; not before one may be valid.

    meanwhile: steps that they make until other hosts' ranks are asked or told.
    """
    if max(steps) - min(steps) > MOST_APART + meanwhile:
        return CannotSuspend(
            f"Its ranks make unequally many optimizer steps (by now {min(steps)} to {max(steps)}), so there "
            "is none behind which all could wait."
        )
    return max(max(steps) + MARGIN + meanwhile, validation.FIRST_STEP + 1)


def came_too_late(steps: Sequence[int], step: int) -> bool:
    """Return whether some rank may not have heard of the step in time; steps: begun, once all were told."""
    return max(steps) >= step


def lacks_room(needed: int, free: int) -> bool:
    """Return whether images of so many bytes, and what CRIU writes beside, may not fit."""
    return needed + needed // 16 > free
