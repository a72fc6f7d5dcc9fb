"""What a rank says of the communicators that it is in, and which recovery it speaks of."""

from dataclasses import dataclass

# The coordinator's term, which its agents' store counts, and the recovery in it. Ordered.
RecoveryNumber = tuple[int, int]
FOREVER = (1 << 64) - 1
EVERYBODY = -1


@dataclass(frozen=True)
class Count:
    """The calls with others that a rank had made on a communicator when it came to a state; FOREVER: now.

    peer: a rank in the communicator; EVERYBODY: `sent` counts collectives, and splits of it.
    """

    state: int
    peer: int
    sent: int
    received: int


@dataclass(frozen=True)
class Membership:
    """What a rank knows of a communicator that it is in: all of what Communicator says, but for the members.

    rank, size: its place there, and how many there are. since, until: the first and the last state, of those
    that the host keeps, that the communicator lives in; FOREVER: it lives still.
    counts: of these states; none where there were no calls.
    """

    key: str
    parent: str
    split: int
    rank: int
    size: int
    since: int = 0
    until: int = FOREVER
    counts: tuple[Count, ...] = ()
