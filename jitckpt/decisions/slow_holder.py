"""Which host is to keep a rank's copies in the place of one that takes them too slowly. Pure.

A holder is slow where a copy takes longer than it is from one snapshot to the next, several times in a row:
then the training waits for it. Whether another host is faster nobody knows before it has taken one (it may be
the sender's own link that is slow), so each of the others is tried once, by one snapshot, and stays if it is
much faster.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

IN_A_ROW = 3
FASTER = 0.5  # of the time that the slow one takes


@dataclass
class HolderSpeeds:
    """Of one rank's copies, in one start: how long hosts take for one, which were late, and were tried."""

    seconds: dict[int, float] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)

    def took(self, host: int, seconds: float, room: float) -> None:
        """A copy has taken so long. room: from one snapshot to the next; 0 where that is not known."""
        self.seconds[host] = seconds
        self.late[host] = self.late.get(host, 0) + 1 if 0 < room < seconds else 0

    def is_slow(self, host: int) -> bool:
        return self.late.get(host, 0) >= IN_A_ROW

    def instead(self, host: int, others: Iterable[int]) -> int | None:
        """Return which of the others is to be tried with the next copy; None: the host stays."""
        left = [other for other in others if other not in self.tried] if self.is_slow(host) else []
        if not left:
            return None
        self.tried.add(left[0])
        return left[0]

    def is_faster(self, tried: int, host: int) -> bool:
        """Return whether the one that was tried stays in the place of the other."""
        return self.seconds[tried] <= FASTER * self.seconds[host]
