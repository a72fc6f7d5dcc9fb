"""How long what a job has in its hosts' memory is likely to survive the loss of hosts (REFT, section 5).

By how often the job itself has lost one, and by where its newest state lies, as its events tell. Hosts that
are lost are taken for not replaced; a job that is protected again after each loss does better.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput
from jitckpt.events import Event
from jitckpt.planning.counting import surviving_losses
from jitckpt.planning.survival import Weibull, group_survival
from jitckpt.planning.units import DAY_SECONDS, HOUR_SECONDS, show_seconds

SPANS = {"hour": HOUR_SECONDS, "day": DAY_SECONDS, "week": 7 * DAY_SECONDS}
SPAN_NAMES = {"hour": "an hour", "day": "a day", "week": "a week"}
WORTH_SAYING = 0.5  # of a chance that is at least so large
# So many losses are at most to be expected, with 95 %, where none was seen (the rule of three).
MOST_WHERE_NONE = 3.0


@dataclass(frozen=True)
class MemorySurvival:
    """hosts: that keep the state. losses: of hosts, in so many `host_seconds`, summed over all hosts.

    between_losses: the mean seconds from one loss of the same host to the next; where none was seen, the
    least that can be said (is_bound), with 95 %. chances: that the state survives, by the names of SPANS.
    """

    hosts: int
    losses: int
    host_seconds: float
    between_losses: float
    is_bound: bool
    chances: Mapping[str, float]


def survival_in_memory(jobs: Sequence[Sequence[Event]]) -> MemorySurvival | None:
    """Return what the events of these jobs tell, each in order; None if the last one has nothing in memory.

    Raises InvalidInput where copies lie so that it can't be counted.
    """
    placements = [event for event in jobs[-1] if event["event"] == "memory_placement"] if jobs else []
    seconds = sum(max(0.0, events[-1]["time"] - events[0]["time"]) for events in jobs)
    if not placements or seconds == 0.0:
        return None
    newest = placements[-1]
    hosts = len(newest["hosts"])
    lost = [event for events in jobs for event in events if event["event"] == "detected"]
    losses = sum(event["cause"] == "host" for event in lost)
    between = hosts * seconds / (losses or MOST_WHERE_NONE)
    host = Weibull.of_mean(between)
    kept_by = [by for one in newest["hosts"] for by in needed(one["kept_by"], one.get("in_parts_on", ()))]
    groups, may_be_lost = newest.get("parity_groups", []), newest.get("parity_losses", 1)
    chances = {
        name: chance(host, hosts, kept_by, groups, span, parity_losses=may_be_lost)
        for name, span in SPANS.items()
    }
    return MemorySurvival(hosts, losses, hosts * seconds, between, losses == 0, chances)


def needed(kept_by: Collection[int], in_parts_on: Collection[int]) -> list[Collection[int]]:
    """Return sets of hosts, of each of which one has to be there for a state to be.

    kept_by: each of these has all of it. in_parts_on: these have it all together, if there are any.
    """
    return [{*kept_by, part} for part in in_parts_on] or [kept_by]


def chance(
    host: Weibull,
    hosts: int,
    kept_by: Sequence[Collection[int]],
    parity_groups: Sequence[Collection[int]],
    seconds: float,
    *,
    parity_losses: int = 1,
) -> float:
    """Return how likely all is still there after so many seconds, with no host replaced.

    kept_by: sets of hosts, of each of which one is needed (`needed`). parity_groups: where hosts keep
    parity, the groups, each of which may lose so many hosts.
    """
    if parity_groups:
        return math.prod(group_survival(host, len(one), parity_losses, seconds) for one in parity_groups)
    holders = [[one for one in those if one < hosts] for those in kept_by]  # others have left the job
    if not all(holders):
        return 0.0
    alive, failed = host.alive(seconds), host.failed(seconds)
    ways = surviving_losses(holders, hosts)
    return math.fsum(float(count) * failed**lost * alive ** (hosts - lost) for lost, count in enumerate(ways))


def in_words(jobs: Sequence[Sequence[Event]]) -> str:
    """Return it as sentences; one that says why not, where nothing can be said."""
    try:
        found = survival_in_memory(jobs)
    except InvalidInput as error:
        return f"How long the state in memory is likely to survive can't be said: {error}."
    if found is None:
        return "The last job of this directory has told of nothing that it has in memory."
    hosts = f"{found.hosts} host{'s' if found.hosts > 1 else ''}"
    lost = "none was" if found.is_bound else "1 was" if found.losses == 1 else f"{found.losses} were"
    between, time = show_seconds(found.between_losses), show_seconds(found.host_seconds / found.hosts)
    if found.is_bound and found.chances["hour"] < WORTH_SAYING:
        return (
            f"Of {hosts} none was lost in {time}, which is too short a time to say how likely what is in "
            "memory is to survive the loss of hosts."
        )
    often = f"less often than once in {between}, with 95%" if found.is_bound else f"once in {between}"
    least = "at least " if found.is_bound else ""
    likely = ", ".join(
        f"{SPAN_NAMES[name]} with {least}{_percent(one)}" for name, one in found.chances.items()
    )
    return (
        f"Of {hosts} {lost} lost in {time}: each is lost {often}. What is in memory survives {likely}, if no "
        "host that is lost is replaced."
    )


def _percent(share: float) -> str:
    """Return it with as many digits as tell it from 100 %."""
    digits = 1 if share < 0.99 else min(6, max(1, math.ceil(-math.log10(max(1 - share, 1e-9))) - 1))
    return f"{math.floor(share * 100 * 10**digits) / 10**digits:.{digits}f}%"
