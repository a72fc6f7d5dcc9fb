"""Who takes part in the next start of the workers, where one service knows of all agents. Pure.

An agent is ready for the next start if it has no part in the newest one, or its ranks there have ended. A
start needs the ranks of all its hosts: as soon as one of them has said that its ranks have ended, that start
is over for all, and another may follow, without those that are lost or cut off. If none has said so, nobody
knows whether it still runs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """An agent that is there. after: the number of the newest start in which its ranks have ended.

    place: the one that its user has given it, if any. since: higher for those that have come later. step:
    the newest of which it knows a save.
    """

    after: int
    place: int | None
    since: int
    step: int


@dataclass(frozen=True)
class Start:
    """A start of the workers: its number, its agents in the order of their places, the newest safe step."""

    number: int
    agents: tuple[str, ...]
    step: int


def next_start(
    members: Mapping[str, Member], last: Start | None, is_over: bool, lost: Collection[str], hosts: int
) -> Start | None:
    """Return the start of so many hosts that may begin now; None if there has to be waited.

    lost: agents of the last start that the one who asks sees no more; it does not wait for them.
    """
    if last is not None and not is_over:
        return None
    before = () if last is None else last.agents
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
    return Start(number + 1, placed, step)


def _placed(ready: Mapping[str, Member], before: Collection[str], hosts: int) -> tuple[str, ...] | None:
    """Give each place to who had it, else to who wishes it, else to who wishes none, the oldest first."""
    free = sorted(ready, key=lambda agent: ready[agent].since)
    had = dict(enumerate(before))
    placed: dict[int, str] = {}
    for suits in (
        lambda agent, place: had.get(place) == agent,
        lambda agent, place: ready[agent].place == place,
        lambda agent, place: ready[agent].place is None,
    ):
        for place in range(hosts):
            agent = next((agent for agent in free if suits(agent, place)), None)
            if place not in placed and agent is not None:
                placed[place] = agent
                free.remove(agent)
    return tuple(placed[place] for place in range(hosts)) if len(placed) == hosts else None
