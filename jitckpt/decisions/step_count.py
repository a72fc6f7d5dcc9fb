"""How the first host hears which steps are whole everywhere: they are counted up the tree of hosts. Pure.

Each host tells the next one above it at once what its own ranks have, and what all hosts below it have once
there is a newer step of all of them. So none hears more than 2 * FAN_OUT messages a step, however many hosts
there are. A host that is lost takes only what it alone knows with it: those below it tell the next one above.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jitckpt.decisions.sources import confirmed
from jitckpt.decisions.step_tree import children, parent
from jitckpt.wire.agents import Counted, Keepers


def below(host: int, hosts: int) -> list[int]:
    """Return all hosts whose way to the first one is by this host."""
    found = list(children(host, hosts))
    for one in found:  # which grows meanwhile
        found += children(one, hosts)
    return found


def above(host: int, lost: Collection[int]) -> int | None:
    """Return whom a host tells: of those above it the next that is not lost; None if there is none."""
    found = parent(host)
    while found is not None and found in lost:
        found = parent(found)
    return found


@dataclass(frozen=True)
class _Known:
    """The newest that was said of one host, with others or alone."""

    said: Counted
    kept: Keepers | None

    @property
    def newest(self) -> int:
        return max(self.said.steps, default=0)


class StepCount:
    """What one host knows of its own ranks' steps, and of those of all hosts below it."""

    def __init__(self, host: int, hosts: int) -> None:
        self._host = host
        self._groups = [group for group in ([host], below(host, hosts)) if group]
        self._known: dict[int, _Known] = {}
        self._above: int | None = None
        self._told: dict[int, Counted] = {}  # by the group's first host

    def hear(self, said: Counted) -> None:
        """Take in what is said of this host, or of hosts below it. Raises ValueError for another one.

        What was said later may come earlier, where a host between is lost: no host goes back in a start.
        """
        if not {*said.hosts} <= {one for group in self._groups for one in group}:
            raise ValueError(f"hosts {said.hosts!r:.200} are not below host {self._host}")
        kept = {one.host: one for one in said.kept}
        for host in said.hosts:
            new = _Known(said, kept.get(host))
            if host not in self._known or new.newest >= self._known[host].newest:
                self._known[host] = new

    def news(self, lost: Collection[int]) -> Sequence[tuple[int, Counted]]:
        """Return whom to tell what it has not been told; lost: hosts."""
        to = above(self._host, lost)
        if to != self._above:
            self._above, self._told = to, {}
        if to is None:
            return []
        found = []
        for group in self._groups:
            said, before = self._of(group), self._told.get(group[0])
            # What gives an older step up is no news: that is not looked for any more.
            if said.steps and (
                before is None or max(said.steps) > max(before.steps) or said.kept != before.kept
            ):
                self._told[group[0]] = said
                found.append((to, said))
        return found

    @property
    def everywhere(self) -> int:
        """The newest step that this host and all below it have; 0 if there is none."""
        return max(self._of([host for group in self._groups for host in group]).steps, default=0)

    def kept(self, host: int) -> Keepers | None:
        """Return who has the newest step of a host's ranks; None: who is to have it."""
        return self._known[host].kept

    def give_up_parts(self, of: Collection[int], on: int) -> bool:
        """A host has no parts any more of these hosts' ranks' states; return whether it was to have some."""
        gone = [host for host in of if host in self._known and self._has_parts(host, on)]
        for host in gone:
            known = self._known[host]
            assert known.kept is not None
            self._known[host] = replace(known, kept=replace(known.kept, parts=[]))
        return bool(gone)

    def _has_parts(self, host: int, on: int) -> bool:
        kept = self._known[host].kept
        return kept is not None and on in kept.parts

    def _of(self, hosts: Sequence[int]) -> Counted:
        """Return what is known of all of these hosts."""
        known = [self._known[host] for host in hosts if host in self._known]
        newest = confirmed(one.said.steps for one in known) if len(known) == len(hosts) else 0
        if not newest:
            return Counted(list(hosts), [])
        steps = sorted(set.intersection(*({*one.said.steps} for one in known)))
        took = [one.said for one in known if one.said.took == newest]
        return Counted(
            list(hosts),
            steps,
            [one.kept for one in known if one.kept is not None],
            newest if took else 0,
            max((one.seconds for one in took), default=0.0),
            min((one.said.step_seconds for one in known if one.said.step_seconds > 0), default=0.0),
        )
