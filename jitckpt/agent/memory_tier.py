"""The agent's part of the memory tier: whose memory this host has, and what it fetches before a start.

It lives as long as the agent, with the memory of this host's ranks and what the host keeps for others. What
it does while the workers run: protection.py.
"""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jitckpt._memory_tier import Pace
from jitckpt.agent.keeping import KeptMemory
from jitckpt.console import say, show_size
from jitckpt.decisions import sources
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import holders
from jitckpt.decisions.memory_wanted import BY_SCRIPT, Wanted
from jitckpt.decisions.placement import Machine, Placement
from jitckpt.decisions.sources import Kind, Source
from jitckpt.errors import HostsError, JitckptError, SaveError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.system.free_memory import free_memory
from jitckpt.tiers import asked, host_memory, own_shard, peers
from jitckpt.tiers.host_memory import WORDS, HostMemory
from jitckpt.tiers.peers import PeerMemory
from jitckpt.tiers.tier import Held
from jitckpt.wire.environment import MEMORY_EVERY, MEMORY_LIMIT, MEMORY_TIER

FREE_PART = 0.8


class MemoryTier:
    """This host's memory for snapshots, over all starts of the workers."""

    def __init__(self, wanted: Wanted, job: str, log: EventLog) -> None:
        """job: what tells it from other jobs on this host. Raises JitckptError or OSError.

        As long as the script may say what it wants, and has not, no keeper is started.
        """
        self.wanted = wanted
        self._job, self._log = job, log
        self._holding = threading.Lock()
        self._keeper = KeptMemory(job, wanted.keep, start=wanted.mode != BY_SCRIPT)
        self.limit = int(free_memory() * FREE_PART) if wanted.limit is None else wanted.limit
        self.memory = HostMemory(self._keeper.descriptors, self.limit)
        self.pace = Pace()  # of all that this host sends
        self._may_hold: frozenset[int] = frozenset()  # ranks of other hosts

    def variables(self, ranks: int) -> dict[str, str]:
        """Return what the workers, so many on this host, are told."""
        if self.wanted.mode == BY_SCRIPT:
            return MEMORY_LIMIT.to(self.limit / ranks)
        return {
            **MEMORY_TIER.to(self.wanted.mode),
            **MEMORY_EVERY.to(self.wanted.steps),
            **MEMORY_LIMIT.to(self.limit / (ranks * self.wanted.copies)),
        }

    def hear(self, rank: int) -> bool:
        """A rank of this host has begun; return whether its script wants something of the tier.

        What it wants it has written into its memory (tiers/asked.py). Raises JitckptError or OSError.
        """
        told = asked.of(self.memory.of(rank))
        if self.wanted.mode != BY_SCRIPT or told is None:
            return self.wanted.mode != BY_SCRIPT
        with self._holding:
            self.wanted = replace(told, domains=self.wanted.domains, address=self.wanted.address)
            if told.limit is not None:
                self.limit = self.memory.limit = told.limit
            self._keeper.start(told.keep)
            for known, descriptor in self.memory.descriptors.items():
                self._keeper.hold(known, descriptor)
        return True

    def given(self, rank: int) -> int:
        """Return the memfd of a rank that is about to start, with nothing said of it yet."""
        known = rank in self.memory.descriptors
        descriptor = self.memory.of(rank)
        for word in WORDS:
            host_memory.put_word(descriptor, word, 0)
        if not known:
            self._hold(rank)
        return descriptor

    def answer_others(self, hosts: Hosts) -> None:
        """Answer other hosts of this meeting; to be called before they are connected. Raises HostsError."""
        placed = placement_of(hosts, self.wanted.copies).holders
        by_script = self.wanted.mode == BY_SCRIPT  # how many copies is not known yet
        self._may_hold = frozenset(
            rank
            for host, one in enumerate(hosts.all)
            if host != hosts.index and (by_script or hosts.index in placed[host])
            for rank in one.ranks
        )
        hosts.answers[peers.VISIT] = partial(peers.serve, self.memory, self._why_not)

    def gather(self, hosts: Hosts) -> None:
        """Fetch from other hosts' memory what this host's ranks lack to go on from the step that all will.

        What can't be had is no error here: then the ranks agree on files.
        """
        begun = time.monotonic()
        tiers = {host: PeerMemory(hosts, host) for host in range(len(hosts.all)) if host != hosts.index}
        held: dict[int, Sequence[Held]] = {hosts.index: self.memory.has()}
        for host, tier in tiers.items():
            try:
                held[host] = tier.has()
            except (LinkError, SaveError) as error:
                self._warn(f"what {hosts.name(host)} has in memory is not known: {error}")
        failed: list[Source] = []
        fetched = 0
        while (plan := decide(hosts, held, failed)) is not None:
            for rank in hosts.all[hosts.index].ranks:
                source = plan.sources[rank]
                try:
                    if source.host == hosts.index:
                        host_memory.check(self.memory.of(rank), source.step)
                        continue
                    timeline = _within_job(source.timeline)
                    fetched += tiers[source.host].get(rank, source.step, timeline, self.memory)
                    self._hold(rank)
                except (LinkError, SaveError) as error:
                    failed.append(source)
                    self._warn(f"a copy of rank {rank}'s state is passed over: {error}")
                    break
            else:
                seconds = time.monotonic() - begun
                self._log.write(
                    "memory_sources", step=plan.step, bytes=fetched, seconds=seconds, reason=plan.reason
                )
                if fetched:
                    say(
                        f"{hosts.name(hosts.index)} has fetched its ranks' state from other hosts' memory: "
                        f"{show_size(fetched)} in {seconds:.2f} s."
                    )
                break

    def write_saves(self, directory: Path, ranks: Collection[int], step: int) -> None:
        """The job ends: write what memory has of these ranks to files, from which another job can go on."""
        size = 0
        begun = time.monotonic()
        try:
            for rank in sorted(ranks):
                size += own_shard.write_save(self.memory.of(rank), directory, step)[1]
        except (SaveError, OSError) as error:
            self._warn(f"step {step}, which is in memory alone, could not be written to {directory}: {error}")
            return
        self._log.write("memory_written", step=step, bytes=size, seconds=time.monotonic() - begun)
        say(
            f"the state after step {step}, which was in memory alone, lies in {directory} now: "
            f"{show_size(size)}; the same command goes on from there."
        )

    def close(self, *, end: bool) -> None:
        """Free the memory; end: no later agent goes on from it."""
        self.memory.close()
        self._keeper.close(end=end)

    def see_keeper(self) -> None:
        """Replace the keeper if it was killed."""
        for rank in list(self.memory.descriptors)[:1]:
            self._hold(rank)

    def _hold(self, rank: int) -> None:
        """Have the keeper hold a rank's memory; one that was killed is replaced, and gets all."""
        with self._holding:
            if not self._keeper.is_there:
                return
            try:
                self._keeper.hold(rank, self.memory.of(rank))
            except OSError:
                self._keeper.close(end=True)
                try:
                    self._keeper = KeptMemory(self._job, self.wanted.keep)
                    for known, descriptor in list(self.memory.descriptors.items()):
                        self._keeper.hold(known, descriptor)
                except (JitckptError, OSError) as error:
                    self._warn(
                        f"the memory tier has no keeper: {error} This host's memory ends with its agent."
                    )
                else:
                    self._log.write(
                        "warning", text="the memory tier's keeper was killed; another one holds all"
                    )

    def _why_not(self, rank: int) -> str | None:
        if rank in self._may_hold:
            self._hold(rank)
            return None
        return f"Rank {rank}'s state is not for this host to keep."

    def allow(self, rank: int) -> None:
        """Keep this rank's state, too: the host that was to do it does not answer."""
        self._may_hold |= {rank}

    def forget_strangers(self, hosts: Hosts) -> None:
        """Give back the memory of ranks that this host neither has nor is to keep any more.

        Not before a step of the new start is safe: another host may lack it until then.
        """
        wanted = self._may_hold | set(hosts.all[hosts.index].ranks)
        for rank in set(self.memory.descriptors) - wanted:
            self.memory.forget(rank)
            self._keeper.drop(rank)

    def _warn(self, text: str) -> None:
        self._log.write("warning", text=text)
        say(text)


def _within_job(timeline: str) -> str:
    return timeline.rpartition("/")[2]


def placement_of(hosts: Hosts, copies: int) -> Placement:
    """Return for each host which hosts have its ranks' state, itself first. Raises HostsError."""
    try:
        return holders(machines_of(hosts), copies)
    except InvalidInput as error:
        raise HostsError(
            f"--failure-domains: {error}. Give all hosts the option, and the same file."
        ) from error


def machines_of(hosts: Hosts) -> list[Machine]:
    """Return all hosts as what a state can be placed on."""
    return [Machine(one.domains, one.memory or float("inf")) for one in hosts.all]


def decide(
    hosts: Hosts, held: Mapping[int, Sequence[Held]], failed: Collection[Source]
) -> sources.Plan | None:
    """Return where every rank's state comes from, of what all hosts have in memory."""
    ranks = [rank for host in hosts.all for rank in host.ranks]
    found = [
        Source(
            one.rank,
            one.step,
            Kind.OWN_MEMORY if hosts.host_of(one.rank) == host else Kind.PEER_MEMORY,
            f"{one.job}/{one.timeline}",
            host,
            one.bytes,
        )
        for host, of_host in held.items()
        for one in of_host
        if one.rank < len(ranks) == one.world_size
    ]
    return sources.decide(ranks, found, failed)
