"""In which state a rank is, as far as its snapshots in memory are concerned. The states are REFT's. Pure.

healthy: it trains, and memory has a step of it. While it is, it is more closely snap, as long as a newer
snapshot is under way, or completed: the newest that was begun is whole everywhere. unhealthy: its program has
failed, and its host's memory is there. offline: its host is lost, and with it what its memory had.
"""

from typing import Literal

Health = Literal["healthy", "unhealthy", "offline"]
State = Literal[Health, "snap", "completed"]

HEALTHS: tuple[Health, ...] = ("healthy", "unhealthy", "offline")  # the worst last
STATES: tuple[State, ...] = (*HEALTHS, "snap", "completed")


def after(health: Health, heard: Health) -> Health:
    """Return a rank's health after something was heard of it; it gets better only with a new start.

    So hosts that hear the same in another order come to the same, and a snapshot that becomes whole after
    its rank has failed hides no failure.
    """
    return max(health, heard, key=HEALTHS.index)


def snapshot_state(begun: int, safe: int) -> State | None:
    """Return the state of a healthy rank; None as long as memory has nothing of it.

    begun: the step of its newest snapshot. safe: the newest that is whole everywhere. 0: there is none.
    """
    if not safe:
        return None
    return "snap" if begun > safe else "completed"
