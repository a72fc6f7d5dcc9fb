"""Which ranks hold on another host what a rank holds, and where that rank's copy goes then. Pure.

What a replica on another host holds survives the loss of a host by itself. What no other host holds has to be
sent to one. All ranks go on from one step, though; so of a job that has both each rank keeps its steps, and
those with a replica elsewhere have their copy where that is: all but what they alone know is there already.
"""

from collections.abc import Collection, Sequence

from jitckpt.decisions.holders import nearest, shared_kinds
from jitckpt.decisions.placement import Machine
from jitckpt.decisions.sources import listed


def elsewhere(shards: Sequence[int], hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each rank the ranks on other hosts that hold what it holds.

    shards, hosts: of each rank. Where there is one host alone, ranks on other devices count.
    """
    places = hosts if len(set(hosts)) > 1 else range(len(hosts))
    return [
        tuple(
            other
            for other, its_shard in enumerate(shards)
            if its_shard == shard and places[other] != places[rank]
        )
        for rank, shard in enumerate(shards)
    ]


def in_words(of_ranks: Sequence[Collection[int]], hosts: int, why_cut: str = "") -> str:
    """Return what is kept in memory, and why. of_ranks: as from `elsewhere`; some have no others.

    why_cut: which of the rest are cut among replicas, a clause; "" for none.
    """
    alone = [rank for rank, others in enumerate(of_ranks) if not others]
    rest = [rank for rank, others in enumerate(of_ranks) if others]
    where = "host" if hosts > 1 else "device"
    sent = ", and sent to one" if hosts > 1 else ""
    verb = "holds" if len(alone) == 1 else "hold"
    text = f"no other {where} holds what {listed(alone)} {verb}: it is kept in host memory{sent}"
    if not rest:
        return text
    of_rest = f"{text}. {listed(rest).capitalize()} keep{'s' if len(rest) == 1 else ''} the same steps"
    if hosts == 1:
        return of_rest
    if why_cut:
        return f"{of_rest}; {why_cut}"
    return f"{of_rest}, but only what their replicas on another host do not hold is sent, and goes there"


def holders_beside(
    machines: Sequence[Machine], owner: int, placed: Sequence[int], with_replicas: Collection[int]
) -> list[int]:
    """Return which other hosts get a copy of a rank's state, if they may be chosen by where its replicas are.

    placed: who gets it else. with_replicas: the hosts of its replicas. One of these takes the place of a host
    that has none, unless it shares more failure domains with the owner.
    """
    found = [host for host in placed if host in with_replicas]
    rest = nearest(machines, owner, [host for host in placed if host not in with_replicas])
    spare = nearest(machines, owner, [host for host in with_replicas if host not in (owner, *found)])
    for host in rest:
        better = spare and shared_kinds(machines, owner, spare[0]) <= shared_kinds(machines, owner, host)
        found.append(spare.pop(0) if better else host)
    return found
