"""The agent's part of the memory tier: whose memory this host has, and what it fetches before a start.

It lives as long as the agent, with the memory of this host's ranks and what the host keeps for others. What
it does while the workers run: protection.py.
"""

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from jitckpt._memory_tier import Pace
from jitckpt.agent.fetching import Fetching, OwnMemory
from jitckpt.agent.keeping import KeptMemory, LeftMemory
from jitckpt.agent.memory_sources import newest_of_others, ranks_of, within_job
from jitckpt.agent.parity import ParityOfHosts
from jitckpt.agent.spare_memory import MEMORY_PARTS, SpareMemory
from jitckpt.console import say, show_size
from jitckpt.decisions import sources
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.holders import holders, in_use
from jitckpt.decisions.memory_wanted import AUTOMATIC, BY_SCRIPT, GROUP, PARITY, PEER, SHARDED, Wanted
from jitckpt.decisions.placement import Machine, Placement
from jitckpt.decisions.redundancy import LEAST_GROUP
from jitckpt.decisions.sources import Kind, Source, SourcePlan
from jitckpt.errors import HostsError, JitckptError, SaveError
from jitckpt.events import EventLog
from jitckpt.hosts import visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.system.free_memory import free_memory
from jitckpt.tiers import asked, host_memory, own_shard, parity_peers, peers, remade_peers
from jitckpt.tiers.assembly import Assembled
from jitckpt.tiers.decoding import PieceLost
from jitckpt.tiers.host_memory import WORDS, HostMemory
from jitckpt.tiers.parity import ParityMemory, Stripe
from jitckpt.tiers.parity_peers import PeerParity
from jitckpt.tiers.remaking import Remaker
from jitckpt.wire import visits
from jitckpt.wire.environment import MEMORY_EVERY, MEMORY_LIMIT, MEMORY_TIER
from jitckpt.wire.visits import HeldShard

FREE_PART = 0.8
COLLECT_SECONDS = 30.0  # that a host which ends waits for others to have read what they need
HOSTS_OWN = ("domains", "domains_by", "address", "directory")  # of what is wanted: no script can say it
LOOK_SECONDS = 0.05  # between two looks at how far another host is


@dataclass(frozen=True)
class ToCutAnew:
    """Where a state of another number of ranks goes: only files can be cut anew (worker/resharding.py).

    directory: one that all hosts share. job: whose it is; "" as long as that is not known. newest: the step
    that is whole there.
    """

    directory: Path
    job: str
    newest: int = 0


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
        held = self._keeper.descriptors
        of_ranks = {key: one for key, one in held.items() if 0 <= key < MEMORY_PARTS}
        self._left = LeftMemory(of_ranks.values())
        self.memory = HostMemory(of_ranks, self.limit)
        self.spare = SpareMemory(self.memory, held, wanted.directory, self._hold, self._drop)
        self.may_spread = False  # parts of what no host has room for as a whole
        self._parity: ParityOfHosts | None = None
        self._uses_parity = wanted.mode == PARITY
        if wanted.mode in (PARITY, AUTOMATIC):
            of_parity = {_number(key): one for key, one in held.items() if key < 0}
            parities = ParityMemory(of_parity, self.limit, self.memory.taken)
            size = wanted.copies if wanted.mode == PARITY else GROUP
            self._parity = ParityOfHosts(size, self.memory, parities, wanted.beside)
        self.pace = Pace()  # of all that this host sends
        self._may_hold: frozenset[int] = frozenset()  # ranks of other hosts
        self._own: frozenset[int] = frozenset()  # ranks of this host
        self._gathered: int | None = None  # in this meeting: see PeerMemory.gathered
        self._assembled = Assembled(self.memory)
        self._remaker = Remaker(self.memory)
        self._collected = False  # what `collect` does
        # Of the step that this meeting's hosts go on from some lack what they are to keep for others.
        self.lacks_copies = False

    @property
    def parity(self) -> ParityOfHosts | None:
        """The parity of this meeting's hosts; None if none is wanted, or they are too few for it."""
        return (
            self._parity if self._uses_parity and self._parity is not None and self._parity.is_used else None
        )

    def use_parity(self) -> None:
        """In the place of copies, as has been chosen for this start."""
        self._uses_parity, self.may_spread, self._may_hold = True, False, frozenset()

    @property
    def copies(self) -> int:
        """How many hosts are to have each shard, where there is no parity."""
        return 2 + self.wanted.beside if self.wanted.mode == PARITY else self.wanted.copies

    def variables(self, ranks: int) -> dict[str, str]:
        """Return what the workers, so many on this host, are told."""
        if self.wanted.mode == BY_SCRIPT:
            return MEMORY_LIMIT.to(self.limit / ranks)
        share = self.copies if self.parity is None else self.parity.share
        if self.may_spread:
            share = 1  # what there is no room for beside these goes elsewhere
        return {
            **MEMORY_TIER.to(self._mode()),
            **MEMORY_EVERY.to(self.wanted.steps),
            **MEMORY_LIMIT.to(self.limit / (ranks * share)),
        }

    def _mode(self) -> str:
        if self.wanted.sharded:
            return SHARDED
        return PEER if self.wanted.mode == PARITY else self.wanted.mode

    def hear(self, rank: int) -> bool:
        """A rank of this host has begun; return whether its script wants something of the tier.

        What it wants it has written into its memory (tiers/asked.py). Raises JitckptError or OSError.
        """
        told = asked.of(self.memory.of(rank))
        if self.wanted.mode != BY_SCRIPT or told is None:
            return self.wanted.mode != BY_SCRIPT
        with self._holding:
            ours = {name: getattr(self.wanted, name) for name in HOSTS_OWN}
            self.wanted = replace(told, **ours)
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

    def whole(self, rank: int) -> int | None:
        """Return a memfd with what a rank's replicas have of cut states; None if it goes on from none."""
        try:
            return self._assembled.of(rank)
        except SaveError as error:
            self._warn(f"what rank {rank} and its replicas have in memory can't be put together: {error}")
            return None

    def placement(self, hosts: Hosts) -> Placement:
        """Return for each host which hosts get something of its ranks' state. Raises HostsError."""
        if self.parity is None:
            return placement_of(hosts, self.copies)
        groups = [self.parity.group_of(host) for host in range(len(hosts.all))]
        placed = [(host, *(one for one in of if one != host)) for host, of in enumerate(groups)]
        return Placement(PARITY, tuple(placed))

    def answer_others(self, hosts: Hosts) -> None:
        """Answer other hosts of this meeting; to be called before they are connected. Raises HostsError."""
        self._gathered, self._collected, self.lacks_copies = None, False, False
        self.may_spread = (
            self.wanted.mode != PARITY and not self.wanted.sharded and self.copies > 1 and len(hosts.all) > 1
        )
        self._own = frozenset(hosts.all[hosts.index].ranks)
        hosts.answers[peers.VISIT] = partial(
            peers.serve, self.memory, self._why_not, more=self._answer, own=self._own
        )
        self._uses_parity = self.wanted.mode == PARITY
        if self._parity is not None:
            self._parity.meet(hosts)
            if self.parity is not None:
                self._may_hold = frozenset(
                    rank
                    for host, one in enumerate(hosts.all)
                    if host != hosts.index and hosts.index in self.parity.keepers(host)
                    for rank in one.ranks
                )
                return
            if hosts.index == 0 and self._uses_parity:
                least = LEAST_GROUP + self.wanted.beside
                self._warn(
                    f"memory tier: parity needs {least} hosts, and {len(hosts.all)} are here; until more "
                    f"come, {self.copies} hosts have each rank's state, as with --memory-tier peer."
                )
        placed = self.placement(hosts).holders
        by_script = self.wanted.mode == BY_SCRIPT  # how many copies is not known yet
        self._may_hold = frozenset(
            rank
            for host, one in enumerate(hosts.all)
            if host != hosts.index and (by_script or hosts.index in placed[host])
            for rank in one.ranks
        )

    async def _answer(self, request: visits.OfMemory, connection: peers.Connection) -> bool:
        """Do what a visit asks for beside shards (peers.More)."""
        if isinstance(request, visits.WantCollected):
            connection[1].write(visiting.encode(visits.Collected(self._collected)))
            return True
        if isinstance(request, visits.WantGathered):
            connection[1].write(visiting.encode(visits.Gathered(self._gathered)))
            return True
        if await remade_peers.answer(self.memory, self._remaker, self._why_not, request, connection):
            return True
        if await self.spare.answer(self._why_no_part, request, connection):
            return True
        if self._parity is None:
            return False
        of = self._parity.parities  # what hosts of another meeting have left, too
        return await parity_peers.answer(of, self._number_of_stripe, request, connection)

    def gather(self, hosts: Hosts, files: ToCutAnew | None = None) -> int:
        """Fetch from other hosts' memory what this host's ranks lack to go on from the step that all will.

        files: where that goes if it is of another number of ranks; returns the step that was written there,
        0 for none. What can't be had is no error here: then the ranks agree on files.
        """
        tiers = {host: PeerParity(hosts, host) for host in range(len(hosts.all)) if host != hosts.index}
        fetching = self._fetching(hosts, tiers)
        if files is not None and files.job:
            here = fetching.decided()
            newest = max(files.newest, 0 if here is None else here.step)
            other = newest_of_others(hosts, files.job, fetching.held, fetching.parities, fetching.parts)
            if other is not None and other[1].step > newest:
                self._gathered = 0
                return self._write_to_cut_anew(fetching, other, files.directory)
            if other is None and len(fetching.held) == len(hosts.all):
                self._forget_others(hosts, fetching.held, newest)
        step = self._gathered = fetching.get()
        self.lacks_copies = self._lacks_copies(fetching, step)
        if any(fetching.held.values()) and 0 < (least := self._least(hosts, tiers)) < step:
            fetching.get(least)  # another host has found its copies of that step damaged
        elif step == 0 and any(one.world_size == ranks_of(hosts) for one in chain(*fetching.held.values())):
            self._tell_nothing_whole()
        return 0

    def _fetching(self, hosts: Hosts, tiers: Mapping[int, PeerParity]) -> Fetching:
        own = OwnMemory(self.memory, self.spare, self._parity, self._hold, self.may_spread)
        return Fetching(hosts, tiers, own, self._log)

    def _tell_nothing_whole(self) -> None:
        if self._log.leading:
            what = "its parity" if self.wanted.mode == PARITY else "its copies"
            self._warn(
                f"no step is whole in the hosts' memory any more: more is lost than {what} can give back, so "
                "the ranks go on from files, or from the beginning"
            )

    def _forget_others(self, hosts: Hosts, held: Mapping[int, Sequence[HeldShard]], newest: int) -> None:
        """Have no rank count on what another number of ranks has left, of which no step is whole."""
        others = [one for one in chain(*held.values()) if one.world_size != ranks_of(hosts)]
        if any(one.step > newest for one in others):
            self._tell_nothing_whole()
        for one in self.memory.has():
            if one.world_size != ranks_of(hosts):
                self.memory.drop(one.rank, one.step)

    def _write_to_cut_anew(self, fetching: Fetching, of: tuple[int, SourcePlan], directory: Path) -> int:
        """Write what another number of ranks had to files, each rank's on one of the hosts that have it.

        What is cut among ranks is put together on one host, and written once. No rank begins before all hosts
        have done so. Returns the step, 0 if it could not be written.
        """
        (count, plan), begun, size = of, time.monotonic(), 0
        hosts = fetching.hosts
        here = [ranks for ranks in fetching.alike(plan) if plan.sources[ranks[0]].host == hosts.index]
        left = list(here)
        while left:
            whose = sources.listed(left[0])
            again = fetching.decided(plan.step, ranks=count)
            if again is None or (again.step, again.timeline) != (plan.step, plan.timeline):
                self._warn(f"step {plan.step} of {whose} is whole in no host's memory any more")
                return 0
            try:
                size += self._write(fetching, [again.sources[rank] for rank in left[0]], directory)
                del left[0]
            except PieceLost as error:
                fetching.failed.append(error.piece)
                self._warn(f"a copy of {whose}'s state is passed over: {error}")
            except (SaveError, OSError) as error:
                self._warn(
                    f"step {plan.step} of {whose}, which is in memory alone, can't be cut anew: it could not "
                    f"be written to {directory}: {error}"
                )
                return 0
        seconds = time.monotonic() - begun
        told = {"step": plan.step, "bytes": size, "seconds": seconds}
        self._log.write("memory_sources", reason=plan.reason, **told)
        self._log.write("memory_written", **told)
        if ranks := sorted(chain(*here)):
            say(
                f"the state of {sources.listed(ranks)} of {count} after step {plan.step}, which was in "
                f"memory alone, lies in {directory} now, to be cut anew for {ranks_of(hosts)} ranks: "
                f"{show_size(size)} in {seconds:.2f} s."
            )
        return plan.step

    def _write(self, fetching: Fetching, found: Sequence[Source], directory: Path) -> int:
        """Write a state in memory to files, fetched if need be; return the bytes.

        found: a rank's, or those of all ranks among which it is cut. Raises PieceLost if some of it is
        damaged, SaveError or OSError if it can't be written.
        """
        host, memory_kinds = fetching.hosts.index, (Kind.OWN_MEMORY, Kind.PEER_MEMORY)
        here = [one for one in found if one.host == host and one.kind in memory_kinds]
        others = [one for one in found if one not in here]
        for one in here:
            try:
                host_memory.check(self.memory.of(one.rank), one.step)
            except SaveError as error:
                raise PieceLost(one, error) from error
        needed = sum(one.bytes for one in (*others, *(found if len(found) > 1 else ())))
        if (free := int(free_memory() * FREE_PART)) < needed:
            raise SaveError(f"{needed} bytes of memory would be needed for it, and {free} are free.")
        own = {one.rank: os.dup(self.memory.of(one.rank)) for one in here}
        with closing(HostMemory(own)) as memory:  # what comes is not kept: the ranks of this host need others
            for one in others:
                fetching.fetch(one, memory)
            shards = [memory.shard(one.rank, one.step, within_job(one.timeline)) for one in found]
            if len(shards) == 1:
                return own_shard.write_whole(shards[0], directory, self._log.start, f"memory{host}")
            return own_shard.write_put_together(memory, shards, directory, self._log.start, f"memory{host}")

    def _lacks_copies(self, fetching: Fetching, step: int) -> bool:
        """Return whether a host lacks something of this step that it is to keep for others."""
        hosts, held = fetching.hosts, fetching.held
        placed = [list(one) for one in self.placement(hosts).holders]
        has_parity = [
            any(one.step == step for one in fetching.parities.get(host, ())) for host in range(len(hosts.all))
        ]
        # The start before may have chosen parity by itself.
        parity = self._parity if any(has_parity) else self.parity
        if parity is not None and parity.is_used:
            placed = [parity.keepers(host) for host in range(len(hosts.all))]
            if step > 0 and not all(has_parity):
                return True
        there = {(host, one.rank, one.step) for host, of_host in held.items() for one in of_host}
        in_parts = {
            one.rank for of_host in fetching.parts.values() for one in chain(*of_host) if one.step == step
        }
        return step > 0 and any(
            sum(host != owner and (host, rank, step) in there for host in held)
            < sum(holder != owner for holder in of_owner)
            and rank not in in_parts
            for owner, of_owner in enumerate(placed)
            for rank in hosts.all[owner].ranks
        )

    def has_cut_states(self) -> bool:
        return self.wanted.sharded or any(one.members for one in self.memory.has())

    def collect(self, hosts: Hosts, step: int, ranks: Collection[int]) -> tuple[set[int], set[int]]:
        """The job ends: get what replicas of this host's ranks have of a cut state, while others are here.

        Returns, of these ranks of lost hosts, those whose parts are here now, for this host to write, and
        those of which it is to say that nobody has them.
        """
        tiers = self._tiers(hosts)
        self._fetching(hosts, tiers).get(step)
        self._has_collected(hosts, tiers)
        if min(tiers, default=hosts.index) < hosts.index:
            return set(), set()  # for the first host to do
        found = {one.rank for one in self.memory.has() if one.step == step and one.rank in ranks}
        return found, set(ranks) - found

    def write_parts(self, hosts: Hosts, step: int, ranks: Collection[int], directory: Path) -> set[int]:
        """The job ends: write what lies in parts of these ranks of lost hosts to files, on the first host.

        Returns those of which this host is to say that nobody has them.
        """
        tiers = self._tiers(hosts)
        is_first = min(tiers, default=hosts.index) > hosts.index
        left = (
            self._write_all_parts(self._fetching(hosts, tiers), step, ranks, directory) if is_first else set()
        )
        self._has_collected(hosts, tiers)
        return left

    def _write_all_parts(
        self, fetching: Fetching, step: int, ranks: Collection[int], directory: Path
    ) -> set[int]:
        """Write what can be put together of these ranks; a lost part makes another plan. Returns the rest."""
        left, tried = set(ranks), -1
        while len(fetching.failed) > tried:
            tried = len(fetching.failed)
            plan = fetching.decided(step)
            if plan is None or plan.step != step:
                break
            for rank in sorted(left):
                source = plan.sources[rank]
                if source.kind in (Kind.PARTS, Kind.PEER_MEMORY) and self._can_write_of_parts(
                    fetching, source, directory
                ):
                    left.discard(rank)
        return left

    def _can_write_of_parts(self, fetching: Fetching, source: Source, directory: Path) -> bool:
        """Return whether that went well; a part that is lost is added to those that have failed."""
        try:
            self._write_of_parts(fetching, source, directory)
        except PieceLost as error:
            fetching.failed.append(error.piece)
            self._warn(f"a part of rank {source.rank}'s state is passed over: {error}")
            return False
        except (SaveError, OSError) as error:
            self._warn(f"rank {source.rank}'s state, which is in parts, can't be written: {error}")
            return False
        return True

    def _write_of_parts(self, fetching: Fetching, source: Source, directory: Path) -> None:
        """Put a state together, in memory that the ranks of this host need no more, and write it to files."""
        begun = time.monotonic()
        size = self._write(fetching, [source], directory)
        self._log.write("memory_written", step=source.step, bytes=size, seconds=time.monotonic() - begun)
        where = "parts on several hosts" if source.kind == Kind.PARTS else "another host's memory"
        say(
            f"the state of rank {source.rank} after step {source.step}, which was in {where}, lies in "
            f"{directory} now: {show_size(size)}."
        )

    def _tiers(self, hosts: Hosts) -> dict[int, PeerParity]:
        """Return the memory of all other hosts that are there."""
        others = (host for host in range(len(hosts.all)) if host not in {*hosts.lost, hosts.index})
        return {host: PeerParity(hosts, host) for host in others}

    def _has_collected(self, hosts: Hosts, tiers: Mapping[int, PeerParity]) -> None:
        """Wait until the other hosts, too, have what they may need of here."""
        self._collected = True
        until = time.monotonic() + COLLECT_SECONDS
        for host, tier in tiers.items():
            with suppress(LinkError, SaveError):  # it has ended
                while host not in hosts.lost and time.monotonic() < until and not tier.collected():
                    time.sleep(LOOK_SECONDS)

    def _least(self, hosts: Hosts, tiers: Mapping[int, PeerParity]) -> int:
        """Return the oldest step that a host, of those that are not lost, has got what it needs of."""
        found = [self._gathered or 0]
        for host, tier in tiers.items():
            step: int | None = None
            while step is None and host not in hosts.lost:
                try:
                    step = tier.gathered()
                except (LinkError, SaveError):
                    break  # its loss is noticed, and the job starts anew
                if step is None:
                    time.sleep(LOOK_SECONDS)
            if step is not None:
                found.append(step)
        return min(found)

    def write_saves(
        self, directory: Path, ranks: Collection[int], step: int, nowhere: Collection[int] = (), by: str = ""
    ) -> None:
        """The job ends: write what memory has of these ranks to files, from which another job can go on.

        nowhere: ranks of lost hosts of which no host has a copy. by: who writes, where others may, too.
        """
        size = 0
        begun = time.monotonic()
        try:
            for rank in sorted(ranks):
                memory = self.memory.of(rank)
                start, whole = self._log.start, self.whole(rank)
                written = own_shard.write_save(memory, directory, step, start, by or "memory", whole=whole)
                size += written[1]
        except (SaveError, OSError) as error:
            self._warn(f"step {step}, which is in memory alone, could not be written to {directory}: {error}")
            return
        text = (
            f"the state after step {step}, which was in memory alone, lies in {directory} now: "
            f"{show_size(size)}; "
        )
        if nowhere:
            self._warn(
                f"{text}of {sources.listed(sorted(nowhere))}, whose host is lost, no other has a copy."
            )
            return
        self._log.write("memory_written", step=step, bytes=size, seconds=time.monotonic() - begun)
        say(f"{text}the same command goes on from there.")

    def close(self, *, end: bool, succeeded: bool = True) -> None:
        """Free the memory; end: no later agent goes on from it.

        Unless the job has failed before it went on from what an agent before has left, or was refused it.
        """
        if end and not succeeded and self._left.is_there():
            end = False
            self._warn(self._left.in_words(self.wanted.keep))
        self._assembled.close()
        self.spare.close()
        self.memory.close()
        if self._parity is not None:
            self._parity.parities.close()
        self._keeper.close(end=end)

    def see_keeper(self) -> None:
        """Replace the keeper if it was killed."""
        for rank in list(self.memory.descriptors)[:1]:
            self._hold(rank)

    def _memfd(self, key: int) -> int:
        if key >= MEMORY_PARTS:
            return self.spare.descriptors[key]
        if key >= 0 or self._parity is None:
            return self.memory.of(key)
        return self._parity.parities.of(_number(key))

    def _held(self) -> dict[int, int]:
        """Return all memfds as the keeper knows them: parities have negative numbers."""
        of_parity = {} if self._parity is None else self._parity.parities.descriptors
        return {
            **self.memory.descriptors,
            **self.spare.descriptors,
            **{_number(key): one for key, one in of_parity.items()},
        }

    def _drop(self, key: int) -> None:
        self._keeper.drop(key)

    def _hold(self, key: int) -> None:
        """Have the keeper hold a memfd; one that was killed is replaced, and gets all."""
        with self._holding:
            if not self._keeper.is_there:
                return
            try:
                self._keeper.hold(key, self._memfd(key))
            except OSError:
                self._keeper.close(end=True)
                try:
                    self._keeper = KeptMemory(self._job, self.wanted.keep)
                    for known, descriptor in self._held().items():
                        self._keeper.hold(known, descriptor)
                except (JitckptError, OSError) as error:
                    self._warn(
                        f"the memory tier has no keeper: {error} This host's memory ends with its agent."
                    )
                else:
                    self._log.write(
                        "warning", text="the memory tier's keeper was killed; another one holds all"
                    )

    def _number_of_stripe(self, stripe: Stripe) -> int:
        assert self._parity is not None
        number = self._parity.number_of(stripe)
        self._hold(_number(number))
        return number

    def _why_not(self, rank: int) -> str | None:
        if rank in self._may_hold:
            self._hold(rank)
            return None
        return f"Rank {rank}'s state is not for this host to keep."

    def _why_no_part(self, rank: int) -> str | None:
        if self.may_spread and rank not in self._own:
            return None
        return f"Parts of rank {rank}'s state are not for this host to keep."

    def allow(self, rank: int) -> None:
        """Keep this rank's state, too: the host that was to do it does not answer."""
        self._may_hold |= {rank}

    def forget_assembled(self) -> None:
        """The ranks have copied what was put together for them: a step of this start is safe."""
        self._left.is_taken_over = True
        self._assembled.close()

    def forget_strangers(self, hosts: Hosts) -> None:
        """Give back the memory of ranks that this host neither has nor is to keep any more.

        Not before a step of the new start is safe: another host may lack it until then.
        """
        if self._parity is not None:
            for number in self._parity.forget_strangers(all_of_them=self.parity is None):
                self._keeper.drop(_number(number))
        wanted = self._may_hold | set(hosts.all[hosts.index].ranks)
        for rank in set(self.memory.descriptors) - wanted:
            self.memory.forget(rank)
            self._keeper.drop(rank)

    def _warn(self, text: str) -> None:
        self._log.write("warning", text=text)
        say(text)


def _number(key: int) -> int:
    """Return by which number the keeper knows a parity; and the other way round."""
    return -1 - key


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
    domains = in_use([one.domains for one in hosts.all], [one.domains_by for one in hosts.all])
    memory = [one.memory or float("inf") for one in hosts.all]
    return [Machine(*of_host) for of_host in zip(domains, memory, strict=True)]
