"""What this host gets from other hosts' memory, before a start of the workers or as the job ends."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf

from jitckpt.agent.memory_sources import decide, source, timeline, within_job
from jitckpt.agent.parity import ParityOfHosts
from jitckpt.agent.spare_memory import SpareMemory
from jitckpt.console import say, show_size
from jitckpt.decisions.sources import Kind, Piece, Source, SourcePlan
from jitckpt.errors import SaveError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import from_holders, host_memory
from jitckpt.tiers.decoding import PieceLost
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.parity_peers import PeerParity
from jitckpt.tiers.part_peers import PeerParts
from jitckpt.tiers.parts import HeldParts
from jitckpt.wire.visits import HeldParity, HeldShard

MOST_AT_A_TIME = 8  # shards that come at once


@dataclass(frozen=True)
class OwnMemory:
    """This host's. hold: has the keeper hold a rank's. in_parts: whether there may be parts of states."""

    memory: HostMemory
    spare: SpareMemory
    parity: ParityOfHosts | None
    hold: Callable[[int], None]
    in_parts: bool


class Fetching:
    """What all hosts have in memory, and how it comes here; what has failed once is not asked for again.

    held, parities, parts: by host, of those that have answered. failed: what is passed over.
    """

    def __init__(self, hosts: Hosts, tiers: Mapping[int, PeerParity], own: OwnMemory, log: EventLog) -> None:
        """Ask all hosts what they have. tiers: the memory of the others."""
        self.hosts, self._tiers, self._own, self._log = hosts, tiers, own, log
        self.failed: list[Piece] = []
        self.held: dict[int, Sequence[HeldShard]] = {hosts.index: own.memory.has()}
        self.parities: dict[int, Sequence[HeldParity]] = {}
        self.parts: dict[int, HeldParts] = {hosts.index: own.spare.has()} if own.in_parts else {}
        if own.parity is not None:
            self.parities[hosts.index] = own.parity.parities.has()
        for host, tier in tiers.items():
            try:
                self.held[host] = tier.has()
                if own.parity is not None:
                    self.parities[host] = tier.parities()
                if own.in_parts:
                    self.parts[host] = PeerParts(hosts, host).parts()
            except (LinkError, SaveError) as error:
                self._warn(f"what {hosts.name(host)} has in memory is not known: {error}")

    def decided(self, newest: float = inf, ranks: int | None = None) -> SourcePlan | None:
        """Return where every rank's state comes from; None if no step is whole (memory_sources.decide)."""
        of = self.held, self.failed, self.parities
        return decide(self.hosts, *of, newest, parts=self.parts, ranks=ranks)

    def get(self, newest: float = inf) -> int:
        """Get what this host's ranks need of the newest step that is whole; return the step, 0 for none."""
        begun = time.monotonic()
        fetched = 0
        while (plan := self.decided(newest)) is not None:
            known = len(self.failed)
            wanted = self._wanted_here(plan)
            decoded = [one for one in wanted if one.kind in (Kind.PARITY, Kind.PARTS)]
            fetched += self._bring_all([one for one in wanted if one not in decoded])
            if len(self.failed) == known:  # what is put together is so mostly from what is here by now
                fetched += self._bring_all(decoded, at_a_time=1)
            if len(self.failed) == known:
                seconds = time.monotonic() - begun
                self._log.write(
                    "memory_sources", step=plan.step, bytes=fetched, seconds=seconds, reason=plan.reason
                )
                if fetched:
                    say(
                        f"{self.hosts.name(self.hosts.index)} has fetched its ranks' state from other hosts' "
                        f"memory: {show_size(fetched)} in {seconds:.2f} s."
                    )
                return plan.step
        return 0

    def alike(self, plan: SourcePlan) -> list[tuple[int, ...]]:
        """Return a plan's ranks: together those among which a state is cut, each other one alone."""
        together: dict[int, tuple[int, ...]] = {}
        for held in chain(*self.held.values()):
            if (held.step, timeline(held)) == (plan.step, plan.timeline):
                together |= dict.fromkeys(held.members, held.members)
        for parity in chain(*self.parities.values()):  # all hosts that had a part may be lost
            if (parity.step, timeline(parity)) == (plan.step, plan.timeline):
                together |= {rank: members for members in parity.members for rank in members}
        return sorted({together.get(rank, (rank,)) for rank in plan.sources})

    def fetch(self, wanted: Source, into: HostMemory) -> int:
        """Bring into memory what this host has not as a whole; return the bytes that came from others.

        Raises PieceLost, SaveError or LinkError.
        """
        its_timeline = within_job(wanted.timeline)
        if wanted.kind == Kind.PARTS:
            peer_of = partial(PeerParts, self.hosts)
            return self._own.spare.bring(wanted, its_timeline, self.hosts.index, peer_of, into)
        if wanted.kind == Kind.PARITY and self._own.parity is not None:
            return self._own.parity.decode(wanted, its_timeline, self._tiers, into)
        return from_holders.get(self._holders(wanted), its_timeline, into)

    def _bring_all(self, wanted: Sequence[Source], at_a_time: int = MOST_AT_A_TIME) -> int:
        """Have all of these here; return the bytes that came. What can't be had has failed."""
        size = 0
        with ThreadPoolExecutor(at_a_time, "jitckpt-memory-gather") as pool:
            coming = [(one, pool.submit(self._bring, one)) for one in wanted]
        for one, brought in coming:
            try:
                size += brought.result()
            except (LinkError, SaveError, PieceLost) as error:
                self.failed.append(error.piece if isinstance(error, PieceLost) else one)
                self._warn(f"a copy of rank {one.rank}'s state is passed over: {error}")
        return size

    def _bring(self, wanted: Source) -> int:
        """Have a source here, and whole; return the bytes that came from other hosts."""
        if wanted.host == self.hosts.index and wanted.kind in (Kind.OWN_MEMORY, Kind.PEER_MEMORY):
            host_memory.check(self._own.memory.of(wanted.rank), wanted.step)
            return 0
        size = self.fetch(wanted, self._own.memory)
        self._own.hold(wanted.rank)
        return size

    def _holders(self, wanted: Source) -> dict[Source, PeerParity]:
        """Return all hosts that have what a source has, itself first."""
        everywhere = (
            source(self.hosts, host, one) for host in self._tiers for one in self.held.get(host, ())
        )
        same = [
            one
            for one in everywhere
            if (one.rank, one.step, one.timeline) == (wanted.rank, wanted.step, wanted.timeline)
            if one not in self.failed
        ]
        return {one: self._tiers[one.host] for one in (wanted, *same)}

    def _wanted_here(self, plan: SourcePlan) -> list[Source]:
        """Return what this host's ranks need: their own shards, and where those are cut their replicas'.

        First what is here, then what others have, and last what is decoded, by then mostly from what is here.
        """
        hosts = self.hosts
        own = set(hosts.all[hosts.index].ranks)
        needed = [rank for ranks in self.alike(plan) if own.intersection(ranks) for rank in ranks]
        here = [
            source(hosts, hosts.index, one)
            for one in self._own.memory.has()
            if (one.step, timeline(one)) == (plan.step, plan.timeline)
        ]
        near = {one.rank: one for one in here if one not in self.failed}
        found = [near.get(rank, plan.sources[rank]) for rank in needed]
        return sorted(found, key=lambda one: (one.kind == Kind.PARITY, one.host != hosts.index, one.rank))

    def _warn(self, text: str) -> None:
        self._log.write("warning", text=text)
        say(text)
