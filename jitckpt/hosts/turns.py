"""Hosts that are left tell all others one after the other, so that who comes in the place of one knows all.

The first host gives each its turn. A turn lasts until who comes has come to the first host, or is lost: with
two at once each of those that come would call the other where that was before.
"""

from collections import deque
from collections.abc import Callable

from jitckpt.wire.agents import LeavesTurn, WantsTurn

LEADER = 0  # the host that gives turns


class Turns:
    """Of one start of the workers, for the thread of the connections."""

    def __init__(self, give: Callable[[int], None]) -> None:
        """give: tells a host that it is its turn."""
        self._give = give
        self._wait: deque[int] = deque()
        self._has: int | None = None  # whose turn it is
        self._comes: int | None = None  # the place of who comes, once its owner has told all others

    def hear(self, host: int, said: WantsTurn | LeavesTurn) -> None:
        """A host wants its turn, or does without."""
        if isinstance(said, WantsTurn):
            self._wait.append(host)
            if self._has is None:
                self._next()
        elif host in self._wait:
            self._wait.remove(host)
        elif host == self._has and self._comes is None:
            self._next()

    def awaits(self, place: int) -> None:
        """Somebody is about to come to that place."""
        if self._has is not None:
            self._comes = place

    def over(self, place: int) -> None:
        """Who is in that place has come, or is lost."""
        if place in self._wait:
            self._wait.remove(place)
        if self._has is not None and (place == self._comes or (self._comes is None and place == self._has)):
            self._next()

    def _next(self) -> None:
        self._has, self._comes = self._wait.popleft() if self._wait else None, None
        if self._has is not None:
            self._give(self._has)
