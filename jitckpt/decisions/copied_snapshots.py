"""Of which snapshots hosts have copies of each other's parts, and what follows from that. Pure.

A host's part is what it has written of its own ranks' processes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import nearest
from jitckpt.decisions.placement import Machine, place
from jitckpt.decisions.whole_snapshots import Named

# Of which host's part, by its place; the snapshot's step, and its name.
Copied = tuple[int, int, str]


def to_be_had(parts: Sequence[Sequence[Named]], copies: Sequence[Sequence[Copied]]) -> list[list[Named]]:
    """Return of which snapshots each host's part is anywhere; parts, copies: what each host has."""
    everywhere = {one for of_host in copies for one in of_host}
    return [
        sorted({*own, *((step, name) for of, step, name in everywhere if of == host)})
        for host, own in enumerate(parts)
    ]


def having(copies: Sequence[Sequence[Copied]], host: int, named: Named) -> list[int]:
    """Return who has a copy of a host's part of this snapshot."""
    return [other for other, there in enumerate(copies) if (host, *named) in there]


def protected(
    parts: Sequence[Sequence[Named]], copies: Sequence[Sequence[Copied]], wanted: int
) -> list[Named]:
    """Return the snapshots that any `wanted` hosts can be lost with: all parts are on that many others."""
    hosts = range(len(parts))
    return sorted(
        named
        for named in {one for own in parts for one in own}
        if all(
            named in parts[host] and len(set(having(copies, host, named)) - {host}) >= wanted
            for host in hosts
        )
    )


def kept(there: Sequence[Named], guarded: Collection[Named], stays: int) -> list[Named]:
    """Return which stay of those that are whole on all hosts: the newest, and the newest that are protected.

    there: the oldest first. stays: how many of each.
    """
    newest = there[-stays:]
    safe = [one for one in there if one in guarded][-stays:]
    return [one for one in there if one in newest or one in safe]


def given_up(held: Collection[Copied], left: Collection[Copied], named: Collection[Named]) -> list[Copied]:
    """Return which copies go once this host's own whole snapshots are `named`.

    left: by another launcher, of `held`. What is newer than the newest of its own may be what this host has
    not heard of yet.
    """
    newest = max((step for step, _ in named), default=-1)
    return [
        one for one in held if one[1:] not in named and (one[1] <= newest or (one in left and newest >= 0))
    ]


def in_turn(machines: Sequence[Machine], owner: int, copies: int, size: int) -> list[int]:
    """Return to whom a host's part is sent, one after the other, until so many have it.

    size: of a part, in bytes; where not all hosts have room for that, they say so themselves. Raises
    InvalidInput where hosts name different numbers of failure domains.
    """
    try:
        found = place(machines, copies + 1, size)
    except InvalidInput:
        found = place(machines, copies + 1, 0)
    placed = found.holders[owner][1:]
    others = [host for host in range(len(machines)) if host != owner and host not in placed]
    return [*placed, *nearest(machines, owner, others)]


@dataclass(frozen=True)
class Copying:
    """What the first host has heard of one snapshot's copies. lacking: why a part has too few."""

    named: Named
    awaited: frozenset[int]
    lacking: tuple[str, ...] = ()
    bytes: int = 0

    def heard(self, host: int, why: str, size: int) -> "Copying":
        """Return it once this host's part has its copies, or why not; size: bytes that were sent."""
        if host not in self.awaited:
            return self
        return replace(
            self,
            awaited=self.awaited - {host},
            lacking=(*self.lacking, why) if why else self.lacking,
            bytes=self.bytes + size,
        )

    @property
    def is_over(self) -> bool:
        return not self.awaited

    @property
    def is_protected(self) -> bool:
        """Whether every part has all of its copies."""
        return self.is_over and not self.lacking
