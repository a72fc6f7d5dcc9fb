"""What keeps the state of this host's ranks in memory while they run: sends snapshots, and counts them.

A thread sees that a rank has a new whole snapshot in this host's memory, and has it sent to the hosts that
are to hold it. It is counted up the tree of hosts (decisions/step_count.py): a step that every rank has, and
all its holders, is safe. The first host tells all ranks, and only then does one of them give its older step
up. So there is at all times one step that is whole everywhere.
"""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from jitckpt.agent.chosen_method import ChosenMethod
from jitckpt.agent.memory_health import MemoryHealth
from jitckpt.agent.memory_tier import MemoryTier, machines_of
from jitckpt.agent.pacer import Pacer
from jitckpt.agent.sending import MemorySnapshot, Sending
from jitckpt.agent.slow_holders import SlowHolders
from jitckpt.agent.spreading import Spreading
from jitckpt.console import say, show_size
from jitckpt.decisions.holders import nearest, shared_domains
from jitckpt.decisions.memory_state import Health
from jitckpt.decisions.memory_wanted import BY_SCRIPT
from jitckpt.decisions.pace import PROFILED_EVERY
from jitckpt.decisions.replicas import holders_beside
from jitckpt.decisions.step_count import StepCount
from jitckpt.errors import JitckptError, SaveError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.link import LinkError
from jitckpt.tiers import host_memory, shard
from jitckpt.tiers.host_memory import (
    BEGUN,
    COPY_WAITED,
    NO_MORE,
    OFF,
    READY,
    SAFE,
    SETTLED,
    SKIPPED,
    STEP_TIME,
    WAITED,
)
from jitckpt.tiers.parity_peers import PeerParity
from jitckpt.tiers.part_peers import PeerParts
from jitckpt.wire import agents

LOOK_SECONDS = 0.002
KEEPER_SECONDS = 1.0  # between two looks whether the keeper is there
TRIES = 3  # to send a shard to a host that lives, before another one is taken in its place
TRY_SECONDS = 0.2  # between two of them
PATIENCE_SECONDS = 5.0  # with a host that takes nothing
UNCALLED = "no rank has come through jitckpt.init yet: without that --memory-tier keeps nothing in memory"
UNCALLED_SECONDS = 120.0  # without a call of jitckpt.init, until that is said
EVENT_SECONDS = 10.0  # between two events that tell of safe steps
ROOT = 0  # the host that counts
FEW = 4  # failure domains that are named one by one


@dataclass
class _Rank:
    """A rank of this host. sent: its steps that all holders have; begun: the newest that is on its way there.

    holders: the other hosts that are to have them; None as long as that is not known. by, parts: the hosts
    that have the newest of these as a whole, and those that have it all together. snapshot: the step of which
    one was begun last, and when. took: a step, and how long its own took to be on all holders. copied: how
    long one took to be in this host's memory. size: its bytes, as many as went to each other host. problem:
    why another host has not got it; is_refused: by the last one that was asked.
    """

    memory: int
    holders: list[int] | None = None
    begun: int = 0
    sent: set[int] = field(default_factory=set)
    by: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    skipped: int = 0
    snapshot: tuple[int, float] = (0, 0.0)
    took: tuple[int, float] = (0, 0.0)
    copied: float = 0.0
    size: int = 0
    problem: str = ""
    is_refused: bool = False

    @property
    def step_seconds(self) -> float:
        """What a step takes; 0 as long as it is not known."""
        return host_memory.word(self.memory, STEP_TIME) / 1e6


class MemoryProtection(threading.Thread):
    """For one start of the workers. safe: the newest step that is whole everywhere; 0 if there is none."""

    def __init__(
        self, tier: MemoryTier, memories: Mapping[int, int], hosts: Hosts | None, log: EventLog
    ) -> None:
        """memories: memfds of this host's ranks."""
        super().__init__(name="jitckpt-memory", daemon=True)
        self._tier, self._hosts, self._log = tier, hosts, log
        self._own = {rank: _Rank(memory) for rank, memory in memories.items()}
        self._method = ChosenMethod(tier, memories, hosts, log, warn=self._warn, place=self._place)
        self._ranks = list(memories) if hosts is None else [rank for one in hosts.all for rank in one.ranks]
        self._index = 0 if hosts is None else hosts.index
        self._health = MemoryHealth(self._ranks, log)
        self._lost: Collection[int] = ()  # hosts
        self._left: Collection[int] = frozenset()  # hosts that have been seen to be lost
        self._place()
        self._counted = StepCount(self._index, 1 if hosts is None else len(hosts.all))
        self._told_keepers: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        self.safe = 0
        self._settled = 0
        self._left_out = 0  # at the root: up to here ranks may have given up what is newer than the safe step
        self._off: str | None = None
        self._told = 0.0  # when an event told of a safe step
        self._began, self._unprotected = time.monotonic(), 0.0  # until the first safe step
        self._said: set[str] = set()
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._stop_sending = os.eventfd(0, os.EFD_CLOEXEC)
        self._senders = ThreadPoolExecutor(max(1, len(memories)), "jitckpt-memory-send")
        self._uncalled = threading.Timer(UNCALLED_SECONDS, self._tell_uncalled)
        self._uncalled.daemon = True
        self._uncalled.start()

    def _place(self) -> None:
        placed = None if self._hosts is None else self._tier.placement(self._hosts)
        self._placed = ((0,),) if placed is None else placed.holders
        self._domains: list[str] = []  # that have two copies of one state
        self._kept_clear_of = ""
        if self._hosts is not None and placed is not None and self._tier.parity is None:
            machines = machines_of(self._hosts)
            self._domains = shared_domains(machines, placed)
            by = self._hosts.all[0].domains_by or "--failure-domains"
            self._kept_clear_of = _in_words({name for one in machines for name in one.domains}, by)
        self._holders = [host for host in self._placed[self._index] if host != self._index]
        # Of each host, those that have what its ranks had in the newest safe step, itself among them.
        self._keepers = {host: list(by) for host, by in enumerate(self._placed)}
        # Of each host, those that have it all together, where no other has it as a whole.
        self._parts: dict[int, list[int]] = {host: [] for host in self._keepers}
        self._spreading: Spreading | None = None
        if self._hosts is not None and self._tier.may_spread:
            everybody = range(len(self._hosts.all))
            self._spreading = Spreading(self._tier.spare, everybody, self._log, self._tell, self._publish)
        self._slow = SlowHolders(self._own, self._hosts, self._warn)
        hosts = 1 if self._hosts is None else len(self._hosts.all)
        self._pace = Pacer(self._tier.wanted.steps, self._method.by_traffic, hosts=hosts)
        self._sending = Sending(self._tier.pace, [own.memory for own in self._own.values()], self._log)

    def hear_rank(self, rank: int) -> None:
        """A rank of this host has begun: if the tier is wanted, look after it from now on."""
        if self.is_alive() or self._stopping.is_set():
            return
        try:
            if not self._tier.hear(rank):
                return
        except (JitckptError, OSError) as error:
            self._end(f"the memory tier can't be used: {error}")
            return
        self._place()  # the script may have asked for another number of copies
        self._uncalled.cancel()
        self.start()

    def step_that_stays(self, lost: Collection[int]) -> int | None:
        """Return the step that is whole in memory without these hosts; None if there is none."""
        if not self.safe or self._off is not None:
            return None
        if self._tier.parity is not None:
            # A parity that lacks the part of one host gives back nothing of the others either.
            alive = self._tier.parity.survives(lost) and all(
                set(self._placed[member]) - {host} <= set(self._keepers[member])
                for host in lost
                for member in self._placed[host]
            )
        else:
            alive = all(
                set(self._keepers[host]) - set(lost)
                or (self._parts[host] and not set(self._parts[host]) & set(lost))
                for host in lost
            )
        return self.safe if alive else None

    def have_failed(self, ranks: Collection[int], health: Health, lost: Collection[int]) -> None:
        """Tell what became of ranks, if memory has something of them. lost: hosts, by now."""
        with self._lock:
            self._health.hear(ranks, health)
            self._lost = frozenset(lost)
            if self.safe and self._off is None:
                self._health.tell(self.step_that_stays(lost))

    def ranks_of(self, lost: Collection[int]) -> tuple[set[int], set[int]]:
        """Return the lost hosts' ranks of whose copies this host has the first, and those with none left."""
        here: set[int] = set()
        nowhere: set[int] = set()
        if self._hosts is None:
            return here, nowhere
        for host in lost:
            left = set(self._keepers[host]) - set(lost)
            if self._tier.parity is not None:
                left &= set(self._tier.parity.keepers(host))
            if min(left, default=self._index) == self._index:
                (here if left else nowhere).update(self._hosts.all[host].ranks)
        return here, nowhere

    def run(self) -> None:
        """Look until it is over. What nobody foresees ends the protection on all hosts, and no training."""
        try:
            self._watch()
        except Exception as error:
            self._warn(f"the memory tier of this host has failed: {error!r}")
            try:
                self._tell(agents.NoSnapshots(next(iter(self._own))))
            finally:
                self._end("what looks after it here has failed")

    def _watch(self) -> None:
        self._tell_unprotected()
        keeper_seen = time.monotonic()
        while not self._stopping.wait(LOOK_SECONDS):
            self.look()
            if time.monotonic() > keeper_seen + KEEPER_SECONDS:
                keeper_seen = time.monotonic()
                self._tier.see_keeper()
                self._tier.spare.see_limit()

    def look(self) -> None:
        """See what the ranks have put into this host's memory, and whether it needs what it has lent."""
        if self._spreading is not None and (ranks := self._tier.spare.given_back()):
            self._tell(agents.GivenBack(ranks))
        for said in self._method.news(self.safe, self._sending.carried):
            self._tell(said)
        if self._hosts is not None and self._hosts.lost != self._left:
            self._left = self._hosts.lost
            self._count()  # those below a host that is lost tell another one
        for rank, own in self._own.items():
            if host_memory.word(own.memory, OFF):
                if self._off is None:
                    self._tell(agents.NoSnapshots(rank))
                continue
            if not host_memory.word(own.memory, READY):
                continue  # what is there may be of a start before this one
            begun = host_memory.word(own.memory, BEGUN)
            if begun != own.snapshot[0]:
                own.snapshot = (begun, time.monotonic())
            skipped = host_memory.word(own.memory, SKIPPED)
            if skipped > own.skipped:
                own.skipped = skipped
                self._tell(agents.SnapshotSkipped(rank, skipped))
            for slot, seal in host_memory.found(own.memory) if self._method.is_decided else ():
                if seal.step > own.begun:  # an older one has been sent, or is needed no more
                    own.begun = seal.step
                    if seal.step == own.snapshot[0]:
                        own.copied, own.size = time.monotonic() - own.snapshot[1], seal.size
                    sending = self._senders.submit(self._send, rank, own, slot, seal.step)
                    sending.add_done_callback(partial(self._sent, rank))

    def stop(self) -> None:
        """End the thread, and what it sends."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._uncalled.cancel()
        self._tell_uncalled()
        if self.is_alive():
            self.join()
            if self.safe and self._off is None and self._log.leading:
                self._tell_figures()  # of the whole start
                self._tell_keepers()
        os.eventfd_write(self._stop_sending, 1)
        self._senders.shutdown(wait=True, cancel_futures=True)
        os.close(self._stop_sending)

    def hear(self, host: int, said: agents.OfMemory) -> None:
        """Take in what another host says, or this one. Raises ValueError for nonsense."""
        with self._lock:
            if isinstance(said, agents.OF_SPREADING):
                self._hear_of_parts(host, said)
            elif isinstance(said, agents.OF_METHOD):
                for answer in self._method.hear(host, said, self._pace, self.safe, self._settled):
                    self._publish(answer)
            else:
                self._hear_of_steps(host, said)

    def _hear_of_steps(self, host: int, said: agents.OfSteps) -> None:
        match said:
            case agents.Counted():
                self._counted.hear(said)
                if said.took:
                    self._pace.measured(said.took, said.seconds, said.step_seconds)
                self._count()
            case agents.SnapshotSkipped(rank, step):
                self._leave_out(rank, step)
            case agents.NoSnapshots(rank) if rank in self._ranks:
                if self._off is None:
                    self._publish(agents.ProtectionEnds(rank))
            case agents.ProtectionEnds(rank):
                self._end(f"rank {rank} makes no snapshots any more")
            case agents.Allow(rank):
                self._tier.allow(rank)
            case agents.Safe(safe, settled, keepers, parts, every, since):
                if len(keepers) == len(parts) == len(self._keepers):
                    self._keepers, self._parts = dict(enumerate(keepers)), dict(enumerate(parts))
                if every and (every, since) != self._pace.rule:
                    self._method.change_pace(self._pace, said)
                self._is_safe(safe, settled)
            case unknown:
                raise ValueError(f"{unknown!r:.200} of host {host}")

    def _leave_out(self, rank: int, step: int) -> None:
        if step >= NO_MORE:
            newest = f"what memory has of step {self.safe} stays" if self.safe else "memory has none"
            self._warn(f"rank {rank} saves its state no more, so no rank keeps newer steps: {newest}")
            self._left_out = NO_MORE
            self._publish(agents.Safe(self.safe, NO_MORE))
            return
        self._warn(
            f"the snapshot of step {step} was left out: the one before was not whole everywhere after "
            f"{PATIENCE_SECONDS:g} s (rank {rank})"
        )
        settled = self._left_out = max(self._settled, step)
        self._publish(agents.Safe(self.safe, settled, **self._pace.doubled(settled)))
        for answer in self._method.left_out():
            self._publish(answer)

    # This host's ranks.

    def _send(self, rank: int, own: _Rank, slot: int, step: int) -> None:
        """Have all holders take a rank's snapshot; count it then."""
        by, parts = [self._index], self._send_parts(rank, step, False)
        for holder in [] if parts else list(self._holders_of(rank, own, step)):
            took = self._send_to(holder, rank, step)
            if took is None:
                return
            by += took
        if len(by) == 1 and own.is_refused and not parts:
            parts = self._send_parts(rank, step, True)
        if problem := own.problem:
            own.problem = ""
            if not parts:
                where = "" if self._tier.parity is not None else ", in its own host's memory alone"
                self._warn(f"rank {rank}'s state is less protected{where}: {problem}")
        with self._lock:
            own.sent = {step, *sorted(own.sent - {step})[-1:]}
            own.by, own.parts = by, parts
            if step == own.snapshot[0]:
                own.took = step, time.monotonic() - own.snapshot[1]
            if all(one.sent for one in self._own.values()):
                self.hear(self._index, self._of_own_ranks())

    def _of_own_ranks(self) -> agents.Counted:
        """Return what this host says of its ranks."""
        own = list(self._own.values())
        steps = sorted(set.intersection(*(one.sent for one in own)))
        by = [host for host in own[0].by if all(host in one.by for one in own)]
        others = [{*one.by, *one.parts} - {self._index} for one in own]
        spread = by == [self._index] and all(others)  # each of these hosts has a part, or some ranks' copies
        parts = sorted(set().union(*others)) if spread else []
        kept = agents.Keepers(self._index, by, parts)
        is_as_placed = by == list(self._placed[self._index]) and not parts
        took = [one.took[1] for one in own if steps and one.took[0] == steps[-1]]
        return agents.Counted(
            [self._index],
            steps,
            [] if is_as_placed else [kept],
            steps[-1] if took else 0,
            max(took, default=0.0),
            min((one.step_seconds for one in own if one.step_seconds > 0), default=0.0),
        )

    def _sent(self, rank: int, sending: "Future[None]") -> None:
        """See that what no sender foresees does not leave the ranks waiting for a snapshot."""
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._warn(f"rank {rank}'s state can't be sent: {error!r}")
            self._tell(agents.NoSnapshots(rank))

    def _holders_of(self, rank: int, own: _Rank, step: int) -> list[int]:
        """Return which other hosts are to have a rank's snapshots."""
        if own.holders is None:
            own.holders = list(self._holders)
            memory = self._tier.memory
            one = memory.shard(rank, step, memory.timeline(rank, step)) if self._hosts is not None else None
            replicas = [] if one is None else shard.parse_index(one.index, one.seal).replicas
            if replicas and self._hosts is not None and self._tier.parity is None:
                hosts = {self._hosts.host_of(replica) for replica in replicas}
                own.holders = holders_beside(
                    machines_of(self._hosts), self._index, self._holders, sorted(hosts)
                )
        return own.holders

    def _send_to(self, holder: int, rank: int, step: int) -> list[int] | None:
        """Return the host that has the rank's step now, if one has; None if the job is to start anew."""
        assert self._hosts is not None
        problem, refused, holders = "", False, self._own[rank].holders or []
        others = [host for host in range(len(self._hosts.all)) if host not in (self._index, *holders)]
        others = nearest(machines_of(self._hosts), self._index, others)
        if self._tier.parity is not None:
            others = []  # a parity is of a place in its group
        slow = self._slow.of(rank)
        tried = None if self._pace.gradients else slow.instead(holder, others)
        for host in (holder, *others) if tried is None else (tried, holder, *others):
            if host not in self._placed[self._index]:
                self._hosts.send(host, agents.Allow(rank))
            for _ in range(TRIES):
                if self._stopping.is_set() or host in self._hosts.lost:
                    break
                try:
                    begun = time.monotonic()
                    self._put(host, rank, step)
                    room = (self._pace.rule[0] or PROFILED_EVERY) * self._own[rank].step_seconds
                    slow.took(host, time.monotonic() - begun, room)
                except (LinkError, SaveError, OSError) as error:
                    problem = str(error)
                    refused = isinstance(error, SaveError)
                    self._stopping.wait(TRY_SECONDS)
                else:
                    why = slow.why(holder, host) if host == tried else problem
                    if host != holder and why is not None:
                        holders[holders.index(holder)] = host
                        self._warn(f"{self._hosts.name(host)} keeps rank {rank}'s state now: {why}")
                    return [host]
        if self._stopping.is_set() or holder in self._hosts.lost:
            return None
        self._own[rank].problem, self._own[rank].is_refused = problem, refused
        return []

    def _send_parts(self, rank: int, step: int, wanted: bool) -> list[int]:
        """Have several hosts take a part of a snapshot each, as was decided; return them, none if it was not.

        wanted: have it decided if it is not.
        """
        if self._spreading is None or self._hosts is None or self._stopping.is_set():
            return []
        hosts, own = self._hosts, self._own[rank]
        try:
            one = self._tier.memory.shard(rank, step, self._tier.memory.timeline(rank, step))
            found = self._spreading.parts_of(rank, one)
            if not found and wanted:
                found = self._spreading.wanted_parts(rank, one)
            if not found:
                return []

            def peer_of(host: int) -> PeerParts:
                return PeerParts(hosts, host, PATIENCE_SECONDS, pace=self._tier.pace, stop=self._stop_sending)

            with self._sending.under_way():
                took = self._spreading.send(
                    found, one, peer_of, is_measured=self._sending.is_as_fast_as_it_goes
                )
        except (LinkError, SaveError, OSError) as error:
            own.problem = str(error)
            self._spreading.failed(rank)
            return []
        own.size = one.seal.size
        return took

    def _hear_of_parts(self, host: int, said: agents.OfSpreading) -> None:
        if self._spreading is None:
            return
        self._spreading.hear(host, said)
        if not isinstance(said, agents.GivenBack) or self._hosts is None:
            return
        owners = {self._hosts.host_of(rank) for rank in said.ranks if rank in self._ranks}
        if self._counted.give_up_parts(owners, host) and self.safe:
            self._publish(agents.Safe(self.safe, self._settled, *self._found()))

    def _put(self, host: int, rank: int, step: int) -> None:
        assert self._hosts is not None
        memory = self._tier.memory
        timeline = memory.timeline(rank, step)
        peer = PeerParity(self._hosts, host, PATIENCE_SECONDS, pace=self._tier.pace, stop=self._stop_sending)
        begun, took = time.monotonic(), 0.0
        with self._sending.under_way():
            parity = self._tier.parity
            if parity is not None and host not in parity.keepers(self._index):
                parity.put(peer, host, rank, step, timeline)
            else:
                one = memory.shard(rank, step, timeline)
                sent = self._method.put_gradients(host, one, PATIENCE_SECONDS, self._stop_sending)
                if sent is None:
                    given = peer.give(one)
                    sent, took = given.bytes, given.seconds
                    self._method.went(rank, sent)
                self._own[rank].size = sent
        ended = time.monotonic()
        begun = ended - took if took else begun
        if self._spreading is not None and self._sending.is_as_fast_as_it_goes:
            self._spreading.measured(host, self._own[rank].size, ended - begun)
        self._sending.sent(step, begun, ended, self._own[rank].size)

    def _send_in_time(self) -> None:
        """Send no faster than is needed: what is left of the network is the training's."""
        ranks = [MemorySnapshot(own.memory, own.size, own.copied) for own in self._own.values()]
        self._sending.plan(ranks, self._pace.rule[0], self._copies, self._pace)

    @property
    def _copies(self) -> int:
        """How often each snapshot is sent."""
        return len(self._holders) if self._tier.parity is None else self._tier.parity.losses

    def _is_safe(self, safe: int, settled: int) -> None:
        if safe > self.safe:
            self._send_in_time()
            before = self.safe
            if before:
                self._tier.spare.drop_parts(lambda one: one.step < before)
        first = self.safe == 0 < safe
        if first:
            self._unprotected = time.monotonic() - self._began
        self.safe, self._settled = max(self.safe, safe), max(self._settled, settled)
        if self._off is None:
            for own in self._own.values():
                host_memory.put_word(own.memory, SAFE, self.safe)
                host_memory.put_word(own.memory, SETTLED, self._settled)
        now = time.monotonic()
        if first or now > self._told + EVENT_SECONDS:
            self._told = now
            self._tell_user(first)

    def _tell_figures(self) -> int:
        """Write of the newest safe step, and what snapshots have cost; return the bytes that are here."""
        waited, copy_waited = (
            sum(host_memory.word(own.memory, which) for own in self._own.values()) / 1e6
            for which in (WAITED, COPY_WAITED)
        )
        size = sum(held.bytes for held in self._tier.memory.has() if held.step == self.safe)
        sent = sum(own.size for own in self._own.values()) * self._copies
        copied: Counter[str] = Counter()
        minibatch: dict[str, float] = {}
        for own in self._own.values():
            copied.update(host_memory.copied(own.memory))
            for carried, seconds in host_memory.minibatch_seconds(own.memory).items():
                minibatch[carried] = max(seconds, minibatch.get(carried, 0.0))
        self._log.write(
            "memory_safe",
            step=self.safe,
            bytes=size,
            waited=waited,
            copy_waited=copy_waited,
            sent=sent,
            copied=copied,
            minibatch=minibatch,
            unprotected=self._unprotected,
        )
        return size

    def _tell_user(self, first: bool) -> None:
        if self._log.leading:
            size = self._tell_figures()
            self._tell_keepers()
            if first:
                say(self._in_words(size))
                if self._domains:
                    shared = ", ".join(self._domains)
                    self._warn(
                        f"two copies of one state lie in {shared}, which may fail as a whole: with so many "
                        "hosts and copies there is no other way (--failure-domains)"
                    )
        if first:
            self._health.tell(self.step_that_stays(self._lost))
            self._tier.forget_assembled()
        if first and self._hosts is not None:
            self._tier.forget_strangers(self._hosts)

    def _tell_uncalled(self) -> None:
        is_wanted = self._tier.wanted.mode != BY_SCRIPT and self._off is None
        if is_wanted and self.ident is None and self._log.leading:
            self._warn(UNCALLED)

    def _tell_unprotected(self) -> None:
        """Say so where a start goes on from memory of which copies are missing."""
        if self._log.leading and self._tier.lacks_copies:
            say(
                "memory tier: not all hosts have the copies yet that they are to keep: until a step of this "
                "start is safe the state of some ranks is unprotected, and if a host is lost the job may go "
                "back to files."
            )

    def _tell_keepers(self) -> None:
        """Write down which host's memory has whose state, once and whenever that has changed."""
        if (self._keepers, self._parts) == self._told_keepers:
            return
        self._told_keepers = dict(self._keepers), dict(self._parts)
        count = 1 if self._hosts is None else len(self._hosts.all)
        self._log.write(
            "memory_placement",
            hosts=[
                {
                    "host": socket.gethostname() if self._hosts is None else self._hosts.name(host),
                    "ranks": self._ranks if self._hosts is None else self._hosts.all[host].ranks,
                    "kept_by": self._keepers[host],
                    **({"in_parts_on": self._parts[host]} if self._parts[host] else {}),
                }
                for host in range(count)
            ],
            parity_groups=[]
            if self._tier.parity is None
            else [list(one) for one in self._tier.parity.groups],
            parity_losses=0 if self._tier.parity is None else self._tier.parity.losses,
        )

    def _in_words(self, size: int) -> str:
        every = self._pace.rule[0]
        steps = f"every {every} steps" if every > 1 else "every step"
        if not every:
            steps = f"every {PROFILED_EVERY} steps until it is known how often it can be"
        where = "this host" if self._hosts is None else "its host"
        if self._tier.parity is not None:
            losses, beside = self._tier.parity.losses, self._tier.parity.copies
            where = "its host" + (f" and {beside} other{'s' if beside > 1 else ''}" if beside else "")
            where += (
                f", with parity over {len(self._holders) + 1} hosts, of which {_number(losses)} may be lost"
            )
        elif self._holders:
            where = f"its host and {len(self._holders)} other{'s' if len(self._holders) != 1 else ''}"
        return (
            f"memory tier: after {steps} the state of all {len(self._ranks)} ranks{self._cut()} is kept in "
            f"the memory of {where}, {show_size(size)} a step here; protected from step {self.safe} on, "
            f"{self._unprotected:.1f} s after the ranks were started.{self._kept_clear_of}"
        )

    def _cut(self) -> str:
        """Return, in words, among how many ranks this host's are cut."""
        counts = {len(one.members) for one in self._tier.memory.has() if one.rank in self._own}
        if not any(counts):
            return ", which no replica has," if self._tier.wanted.sharded else ""
        return f", cut among {' or '.join(map(str, sorted(counts)))} replicas,"

    def _end(self, reason: str) -> None:
        """Nothing of this start is to be used any more."""
        if self._off is None:
            self._off = reason
            self._warn(f"the memory tier protects this job no more: {reason}")
            for own in self._own.values():  # which would wait for each to be whole everywhere
                host_memory.put_word(own.memory, OFF, 1)
            if self._tier.parity is not None:
                self._tier.parity.parities.drop_all()
            for rank in self._ranks:
                for held in self._tier.memory.has():
                    if held.rank == rank:
                        self._tier.memory.drop(rank, held.step)

    # The root's part, and how all hear of it.

    def _count(self) -> None:
        """Tell who is above what is new; at the root, all."""
        with self._lock:
            if self._index != ROOT:
                assert self._hosts is not None
                for host, said in self._counted.news(self._hosts.lost):
                    self._hosts.send(host, said)
                return
            safe = self._counted.everywhere
            if safe > max(self.safe, self._left_out):
                found = self._found()
                known = [*self._keepers.values()], [*self._parts.values()]
                settled = max(self._settled, safe)
                news = ([], []) if found == known else found
                self._publish(agents.Safe(safe, settled, *news, **self._pace.planned(safe)))

    def _found(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return of each host which hosts have what its ranks have, and which others have it all together.

        The latter where none has all of it.
        """
        kept = [
            self._counted.kept(host) or agents.Keepers(host, list(placed), [])
            for host, placed in enumerate(self._placed)
        ]
        return [one.by for one in kept], [one.parts for one in kept]

    def _publish(
        self, said: agents.Safe | agents.ProtectionEnds | agents.OfMethod | agents.OfSpreading
    ) -> None:
        if self._index == ROOT:
            if self._hosts is not None:
                self._hosts.broadcast(said)
            self.hear(ROOT, said)

    def _tell(self, said: agents.OfMemory) -> None:
        """Tell the root."""
        if self._hosts is None or self._index == ROOT:
            self.hear(self._index, said)
        else:
            self._hosts.send(ROOT, said)

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._log.write("warning", text=text)
            say(f"{text}.")


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def _in_words(domains: Collection[str], by: str) -> str:
    """Return a sentence on the failure domains by which copies are placed; empty if there are none."""
    if not domains:
        return ""
    first = sorted(domains)[:FEW]
    more = f" and {len(domains) - FEW} more" if len(domains) > FEW else ""
    return f" Failure domains, by {by}: {', '.join(first)}{more}."
