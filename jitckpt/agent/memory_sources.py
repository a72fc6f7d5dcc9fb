"""What the memory of a meeting's hosts has, as sources for the policy (decisions/sources.py). Pure."""

from collections.abc import Collection, Mapping, Sequence
from math import inf

from jitckpt.agent.parity import as_parities
from jitckpt.agent.spare_memory import as_parts
from jitckpt.decisions import sources
from jitckpt.decisions.decoding import decodable, whole_of_parts
from jitckpt.decisions.sources import Kind, Piece, Source, SourcePlan
from jitckpt.hosts.connections import Hosts
from jitckpt.saves.starts import Starts
from jitckpt.tiers.parts import HeldParts
from jitckpt.wire.visits import HeldParity, HeldShard


def decide(
    hosts: Hosts,
    held: Mapping[int, Sequence[HeldShard]],
    failed: Collection[Piece],
    parities: Mapping[int, Sequence[HeldParity]],
    newest: float = inf,
    *,
    parts: Mapping[int, HeldParts],
    ranks: int | None = None,
) -> SourcePlan | None:
    """Return where every rank's state comes from, of what all hosts have in memory; newest: of the steps.

    ranks: how many the job had; None: as many as it has now.
    """
    count = ranks_of(hosts) if ranks is None else ranks
    known = Starts(0, {number: step for host in hosts.all for number, step in host.starts})
    found = [
        source(hosts, host, one)
        for host, of_host in held.items()
        for one in of_host
        if one.rank < count == one.world_size and one.step <= newest
        if known.problem(one.start, one.step) is None
    ]
    found += decodable(found, as_parities(parities, count), failed)
    of_shards = as_parts(parts, count, known)
    found += [one for one in whole_of_parts(of_shards, failed) if one.step <= newest]
    return sources.decide(range(count), found, failed)


def newest_of_others(
    hosts: Hosts,
    job: str,
    held: Mapping[int, Sequence[HeldShard]],
    parities: Mapping[int, Sequence[HeldParity]],
    parts: Mapping[int, HeldParts],
) -> tuple[int, SourcePlan] | None:
    """Return how many other ranks have made the newest step that is whole, and where it is; None: none is."""
    of_job = {host: [one for one in of_host if one.job == job] for host, of_host in held.items()}
    counts = {one.world_size for of_host in of_job.values() for one in of_host} - {ranks_of(hosts)}
    plans = ((count, decide(hosts, of_job, (), parities, parts=parts, ranks=count)) for count in counts)
    found = [(count, plan) for count, plan in plans if plan is not None]
    return max(found, key=lambda one: (one[1].step, one[0]), default=None)


def ranks_of(hosts: Hosts) -> int:
    return sum(len(host.ranks) for host in hosts.all)


def timeline(one: HeldShard | HeldParity) -> str:
    return f"{one.job}/{one.timeline}"


def within_job(timeline: str) -> str:
    """Return a timeline as the shards have it."""
    return timeline.rpartition("/")[2]


def source(hosts: Hosts, host: int, one: HeldShard) -> Source:
    """Return what a host has, for the policy."""
    kind = Kind.OWN_MEMORY if one.rank in hosts.all[host].ranks else Kind.PEER_MEMORY
    return Source(one.rank, one.step, kind, timeline(one), host, one.bytes)
