"""Tells which ranks are healthy, unhealthy or offline for the memory tier, as events, in a start."""

from collections.abc import Iterable

from jitckpt.decisions.memory_state import HEALTHS, Health, after
from jitckpt.events import EventLog


class MemoryHealth:
    """What this host knows of all ranks, and what is told of it; an event only where it has changed."""

    def __init__(self, ranks: Iterable[int], log: EventLog) -> None:
        self._log = log
        self._health: dict[int, Health] = dict.fromkeys(ranks, "healthy")
        self._told: dict[int, Health] = {}

    def hear(self, ranks: Iterable[int], heard: Health) -> None:
        """Take note of what became of ranks."""
        for rank in ranks:
            self._health[rank] = after(self._health[rank], heard)

    def tell(self, step: int | None) -> None:
        """Tell what is new. step: that memory has of all ranks; None: what it had is lost.

        A host that comes to lead tells of the failures that it heard of before, which nobody else may have
        told; that ranks were healthy the one before it has told.
        """
        for health in HEALTHS:
            ranks = [rank for rank, one in self._health.items() if one == health != self._told.get(rank)]
            if ranks and (self._log.leading or health == "healthy"):
                self._told |= dict.fromkeys(ranks, health)
                self._log.write("memory_state", state=health, ranks=sorted(ranks), step=step)
