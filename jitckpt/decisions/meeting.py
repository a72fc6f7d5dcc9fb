"""Who takes part in the next start of the workers, where one service knows of all agents. Pure.

An agent is ready for the next start if it has no part in the newest one, or its ranks there have ended. A
start needs the ranks of all its hosts: as soon as one of them has said that its ranks have ended, that start
is over for all, and another may follow, without those that are lost or cut off. If none has said so, nobody
knows whether it still runs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """An agent that is there. after: the number of the newest start in which its ranks have ended.

    place: the one that its user has given it, if any. since: higher for those that have come later. step:
    the newest of which it knows a save. address: neighbours have similar ones. start: the newest that its
    checkpoint directory knows of, from when the job met elsewhere. had: the place that it had, as far as that
    directory shows; it takes any other, too.
    """

    after: int
    place: int | None
    since: int
    step: int
    address: str = ""
    start: int = 0
    had: int | None = None


@dataclass(frozen=True)
class AgreedStart:
    """A start of the workers: its number, its agents in the order of their places, the newest safe step."""

    number: int
    agents: tuple[str, ...]
    step: int


def next_start(
    members: Mapping[str, Member], last: AgreedStart | None, is_over: bool, lost: Collection[str], hosts: int
) -> AgreedStart | None:
    """Return the start of so many hosts that may begin now; None if there has to be waited.

    lost: agents of the last start that the one who asks sees no more; it does not wait for them.
    """
    if last is not None and not is_over:
        return None
    before: tuple[str, ...] = () if last is None else last.agents
    number = 0 if last is None else last.number
    ready = {
        agent: member for agent, member in members.items() if agent not in before or member.after >= number
    }
    if any(agent in members and agent not in ready and agent not in lost for agent in before):
        return None  # it still ends its ranks
    placed = _placed(ready, before, hosts)
    if placed is None:
        return None
    step = max([0 if last is None else last.step, *(members[agent].step for agent in placed)])
    number = max([number, *(members[agent].start for agent in placed)])
    return AgreedStart(number + 1, placed, step)


def stands_by(members: Mapping[str, Member], last: AgreedStart, agent: str) -> int | None:
    """Return which of those that stand by this agent is, from 0, the oldest first; None if it is none."""
    waiting = sorted(members.keys() - set(last.agents), key=lambda other: (members[other].since, other))
    return waiting.index(agent) if agent in waiting else None


def _placed(ready: Mapping[str, Member], before: Sequence[str], hosts: int) -> tuple[str, ...] | None:
    """Give each place to who had it, else to who wishes it, else to who wishes none.

    The oldest come first; those that wish none are in the order of their addresses, but for those whose
    directories have what they need in one place.
    """
    placed = {place: agent for place, agent in enumerate(before) if agent in ready and place < hosts}
    free = sorted(ready.keys() - placed.values(), key=lambda agent: (ready[agent].since, agent))
    for agent in free:
        wish = ready[agent].place
        if wish is not None and wish < hosts:
            placed.setdefault(wish, agent)
    places = [place for place in range(hosts) if place not in placed]
    others = [agent for agent in free if ready[agent].place is None][: len(places)]
    for agent in others:
        had = ready[agent].had
        if had in places:
            placed[had] = agent
            places.remove(had)
    others = [agent for agent in others if agent not in placed.values()]
    others.sort(key=lambda agent: (ready[agent].address, ready[agent].since, agent))
    placed.update(zip(places, others, strict=False))
    return tuple(placed[place] for place in range(hosts)) if len(placed) == hosts else None
