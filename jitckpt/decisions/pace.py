"""How often a snapshot is made for the memory tier, and how fast it is sent.

As in GEMINI a snapshot is to be whole everywhere before the next one begins, and a part of the time is left
unused, since steps are not all alike. What the network has left beside the training is measured by snapshots
that are sent as fast as it goes, while the training makes its steps.
"""

from math import ceil, inf

PROFILED_EVERY = 4  # steps, while it is measured how long a snapshot takes
PROFILED = 3  # snapshots
SHARE, LEAST_SHARE = 0.8, 0.1  # of the time between two snapshots that one may take
MAKES_WAY = 0.1  # of it, beyond that share, by which a snapshot may be late as it made way for the training
BACK_OFF, RECOVER = 0.7, 1.05
NOTICED = 0.01  # of that time: a wait that is longer counts
MOST_EVERY = (1 << 16) - 1


def steps_between(snapshot_seconds: float, step_seconds: float) -> int:
    """Return the least number of steps in which a snapshot is whole everywhere."""
    if step_seconds <= 0:
        return 1
    return min(MOST_EVERY, max(1, ceil(snapshot_seconds / (SHARE * step_seconds))))


def rate(sent_bytes: float, copy_seconds: float, between_seconds: float, share: float = SHARE) -> float:
    """Return bytes per second at which a snapshot is sent in good time; inf: as fast as it goes.

    copy_seconds: until it is in this host's memory and can be sent. between_seconds: from one to the next.
    """
    room = share * between_seconds - copy_seconds
    return sent_bytes / room if room > 0 and sent_bytes > 0 else inf


def next_share(share: float, waited_seconds: float, between_seconds: float) -> float:
    """Return the share for the next snapshot, after the training has waited for this one."""
    if waited_seconds > NOTICED * between_seconds:
        return max(LEAST_SHARE, share * BACK_OFF)
    return min(SHARE, share * RECOVER)


def packed(every: int, since: int) -> int:
    """Return a rule in one word: from step `since` on, every so many steps."""
    return since << 16 | every


def unpacked(word: int) -> tuple[int, int]:
    """Return what `packed` was given: every, since."""
    return word & MOST_EVERY, word >> 16
