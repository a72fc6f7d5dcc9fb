"""Hosts that take the copies of this host's ranks too slowly, and others that are tried in their places."""

from collections.abc import Callable, Iterable

from jitckpt.decisions.slow_holder import IN_A_ROW, HolderSpeeds
from jitckpt.hosts.connections import Hosts

SLOW = f"has taken longer for each of {IN_A_ROW} copies than it is from one to the next"


class SlowHolders:
    """Of all ranks of this host, in one start."""

    def __init__(self, ranks: Iterable[int], hosts: Hosts | None, warn: Callable[[str], None]) -> None:
        """hosts: None where there are no others."""
        self._of = {} if hosts is None else {rank: RanksHolders(rank, hosts, warn) for rank in ranks}

    def of(self, rank: int) -> "RanksHolders":
        return self._of[rank]


class RanksHolders:
    """Of one rank; for the one thread that sends its copies."""

    def __init__(self, rank: int, hosts: Hosts, warn: Callable[[str], None]) -> None:
        self._rank, self._hosts, self._warn = rank, hosts, warn
        self._speeds = HolderSpeeds()

    def took(self, host: int, seconds: float, room: float) -> None:
        """A copy has taken so long. room: from one snapshot to the next; 0 where that is not known."""
        self._speeds.took(host, seconds, room)

    def instead(self, holder: int, others: Iterable[int]) -> int | None:
        """Return which of these is to be tried in the place of a slow holder; None for none."""
        alive = [host for host in others if host not in self._hosts.lost]
        tried = self._speeds.instead(holder, alive)
        if tried is None and self._speeds.is_slow(holder):
            slow = f"rank {self._rank}'s state is protected more slowly: {self._hosts.name(holder)} {SLOW}"
            self._warn(f"{slow}, and no other host is faster")
        return tried

    def why(self, holder: int, tried: int) -> str | None:
        """Return why one that was tried stays in the place of a holder, a clause; None if it does not."""
        if not self._speeds.is_faster(tried, holder):
            return None
        took, takes = self._speeds.seconds[holder], self._speeds.seconds[tried]
        return f"{self._hosts.name(holder)} {SLOW}: {took:.3g} s, and this one {takes:.3g} s"
