"""How the hosts of a job hear that all ranks of all hosts have come to an optimizer step. Pure.

They are a tree: each tells its parent once the ranks of its own and of all hosts below it have come; what the
first host knows of all goes down again. So none tells more than FAN_OUT others, however many there are.

Ranks that have left a host which stays itself are one more host, and no part of the tree: the one that they
have left says what they have come to, as if they were still its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jitckpt.wire.agents import Come

FAN_OUT = 16


def merged(parts: Iterable[Come], step_bits: int) -> Come:
    """Return what the ranks of all parts have come to."""
    known = tuple(parts)
    recoveries = {one.recovery_and_step >> step_bits for one in known}
    return Come(
        min(one.recovery_and_step for one in known) if len(recoveries) == 1 else 0,
        min((one.whole_from for one in known if one.whole_from), default=0),
        any(one.left for one in known),
    )


def parent(host: int) -> int | None:
    """Return whom a host tells; None for the first."""
    return (host - 1) // FAN_OUT if host else None


def children(host: int, hosts: int) -> range:
    """Return who tells this host."""
    return range(min(FAN_OUT * host + 1, hosts), min(FAN_OUT * (host + 1) + 1, hosts))


@dataclass(frozen=True)
class TreePlace:
    """What one host knows: a state machine without clocks or sockets.

    own: of its own ranks. below: of each child. told: what its parent was told last. everywhere: of all
    hosts. ranks_at: the host on which its own ranks go on. ranks_of: the host whose ranks these were, and
    which stays: it is this one's only neighbour.
    """

    host: int
    hosts: int
    step_bits: int
    own: Come = field(default_factory=Come)
    below: Mapping[int, Come] = field(default_factory=dict)
    told: Come = field(default_factory=Come)
    everywhere: Come = field(default_factory=Come)
    ranks_at: int | None = None
    ranks_of: int | None = None

    def here(self, come: Come) -> tuple["TreePlace", Sequence[tuple[int, Come]]]:
        """Take in what this host's own ranks have come to; return whom to tell what."""
        return replace(self, own=come)._news()

    def hear(self, host: int, come: Come) -> tuple["TreePlace", Sequence[tuple[int, Come]]]:
        """Take in what another host says. Raises KeyError for one that has nothing to say here."""
        if host == self._above:
            return self._all_have_come(come)
        if host == self.ranks_at:
            return self.here(come)
        if host not in self._children:
            raise KeyError(f"host {host} is no neighbour of host {self.host}")
        return replace(self, below={**self.below, host: come})._news()

    def _news(self) -> tuple["TreePlace", Sequence[tuple[int, Come]]]:
        come = merged([self.own, *self._children.values()], self.step_bits)
        if self._above is None:
            return self._all_have_come(come)
        come = _grown(self.told, come)
        return (self, ()) if come == self.told else (replace(self, told=come), [(self._above, come)])

    def _all_have_come(self, come: Come) -> tuple["TreePlace", Sequence[tuple[int, Come]]]:
        come = _grown(self.everywhere, come)
        if come == self.everywhere:
            return self, ()
        hear_of_it = [*self._children, *(() if self.ranks_at is None else (self.ranks_at,))]
        return replace(self, everywhere=come), [(host, come) for host in hear_of_it]

    @property
    def _above(self) -> int | None:
        return parent(self.host) if self.ranks_of is None else self.ranks_of

    @property
    def _children(self) -> dict[int, Come]:
        below = children(self.host, self.hosts) if self.ranks_of is None else ()
        return {host: self.below.get(host, Come()) for host in below}


def _grown(before: Come, come: Come) -> Come:
    """What has once been come to stays true, while some go back."""
    return replace(come, recovery_and_step=max(before.recovery_and_step, come.recovery_and_step))
