"""Which hosts may go on together after others were lost, so that two halves never both do. Pure.

A host that is silent may be dead, or cut off and of the opinion that it is the others who are lost. Every
host has one vote on how each start that it took part in goes on, and gives it to the first meeting at which
it agrees. More than half of the votes are needed, so of each start only one other can follow. Hosts that
have said that they end will never vote, and are not counted; hosts that are new have no vote.

Where the store is lost while hosts agree on a start, none that has agreed knows whether the others have, and
run. To such a start there belong the agents that were to agree. If one of those is there that did not agree,
nor ever will, the start has never been, and no vote was given. Else those that are there have to be enough
for both: to follow that start, and the one before it.
"""

from collections.abc import Collection

from jitckpt.wire.hosts import STORE, Past


def may_go_on(hosts: int, ended: Collection[int], voters: Collection[int], holder: int) -> bool:
    """Return whether the hosts `voters`, places in a start of so many, may go on without the others.

    Half of the votes are enough with the holder's. Of two hosts each may go on, but see `missing`.
    """
    electors = set(range(hosts)) - (set(ended) - set(voters))
    given = electors.intersection(voters)
    if hosts <= 2:
        return bool(given)
    return 2 * len(given) > len(electors) or (2 * len(given) == len(electors) > 0 and holder in given)


def missing(pasts: Collection[Past], agents: Collection[str] = ()) -> tuple[int, int] | None:
    """Return None if the hosts that have met with these pasts may go on together.

    Else how many of a start are here, and of how many. Hosts that took part in an earlier start only were cut
    off since, and count as new ones. agents: of all who have met.

    The store of two hosts never moves. If the same store is still there, it knows the newest start; if not,
    the host that had it is gone, and no start of which that was one can go on elsewhere.
    """
    newest = max(pasts, key=lambda past: (past.number, past.start), default=None)
    if newest is None:
        return None
    here = [past for past in pasts if past.start == newest.start]
    earlier = [past for past in pasts if past.start != newest.start]
    voters = {past.place for past in here if past.place >= 0}
    in_doubt = all(past.in_doubt for past in here)
    if in_doubt and any(
        agent in agents and place not in voters for place, agent in enumerate(newest.in_doubt)
    ):
        return missing(earlier, agents)  # one of them has not agreed: it has never begun
    ended = {place for past in here for place in past.ended} - voters
    is_sure = newest.hosts > 2 or newest.holder >= 0 or any(past.place == STORE for past in here)
    if not (is_sure and may_go_on(newest.hosts, ended, voters, newest.holder)):
        return len(voters), newest.hosts - len(ended)
    return missing(earlier, agents) if in_doubt else None
