"""The rendezvous of several hosts by a coordination service, such as etcd, that outlives them all.

Agents are members for as long as they keep a lease alive. One of them, the root, is elected: the key `root`
is its own while its lease lasts, until the next start. Where enough members are ready
(`decisions/meeting.py`) it writes that: number, placement and safe step, at once, on the condition that it is
still the root and nobody has written a start since it looked. That key's revision is what fences: an agent
can write into a start only while no other has followed.

No start follows another of which no agent has said that its ranks have ended (`over`), however long none is
heard of, unless the user knows that silent hosts are dead. So a training that runs needs no service, for as
long as no host fails; and two halves never both go on.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from jitckpt.console import say
from jitckpt.decisions.meeting import AgreedStart, Member, next_start, stands_by
from jitckpt.errors import HostsError, JobEnded, NotNeeded
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.coordination import Coordination, CoordinationError, Entries, LeaseLost
from jitckpt.hosts.job_store import JobStore
from jitckpt.hosts.meeting_entries import MeetingEntries
from jitckpt.hosts.rendezvous import SAME, agree
from jitckpt.hosts.signed import ForeignError, Signature
from jitckpt.hosts.standbys import Standby, announced_at
from jitckpt.hosts.stores import Apart, StoreGone, too_many
from jitckpt.wire.hosts import Host, Past
from jitckpt.wire.moves import JobFacts

LEAST_LEASE = 2.0  # seconds
END_SECONDS = 60.0  # that the word of the job's end waits for a silent service
KEPT = 3  # how often within its time a lease is kept alive
LOOK_SECONDS = 1.0
STANDS_BY = "this host stands by: it takes the place of one that is lost."
COMES_LATER = "this host waits for the job's first start, in which it has no part."
UNWELL_SECONDS = 150.0  # that a host's word on its health lasts: a check, and the pause until the next

Value = TypeVar("Value")


def _without_detail(why: str) -> str:
    """What the silence of a member was like differs each time."""
    return why.partition(" (")[0]


class CoordinatedRendezvous(RendezvousHandler):
    """To torch a handler as any; the agent uses it as it uses LastingRendezvous."""

    has_store = False
    meets_at_once = True  # a second meeting of the same hosts is as quick as any

    def __init__(
        self,
        service: Coordination,
        job: str,
        *,
        hosts: int,
        timeout: float,
        silence: float,
        address: str = "",
        fixed_place: int | None = None,
        secret: bytes | None = None,
        silent_hosts_are_dead: bool = False,
        max_standby: int | None = None,
        is_spare: bool = False,
        resumes: bool = False,
    ) -> None:
        """timeout: seconds for the hosts to come together. silence: seconds after which one is lost.

        is_spare: it has no part in the first start.
        resumes: this agent goes on with a suspended job, whose agents of before may just be ending.
        """
        self.agent = secrets.token_hex(8)
        self.signature = Signature(job, secret)
        self.newest_step: Callable[[], int] = lambda: 0  # of which this agent knows a save
        self.newest_start = 0  # that its checkpoint directory knows of
        self.had_place: int | None = None  # that it shows
        self.on_standing_by: Callable[[], None] = lambda: None  # called once, if this host does
        self.has_waited = False  # until a job that was there already has taken it
        self._service, self._job, self._hosts, self._timeout = service, job, hosts, timeout
        self._lease_seconds = max(LEAST_LEASE, silence)
        self._address, self._fixed_place = address, fixed_place
        self._silent_are_dead = silent_hosts_are_dead
        self._prefix, self._entries = f"jitckpt/{job}/", MeetingEntries(self.signature)
        self._meeting = self._entries.prefix
        self._after = 0  # the number of the newest start of whose ranks here none runs
        self._start: AgreedStart | None = None  # the newest that this agent has a part in
        self._fence = 0  # its revision
        self._lost: frozenset[str] = frozenset()  # agents of the last start that are seen no more here
        self._joined = 0  # the revision at which this agent came
        self._resumes, self._came_after = resumes, 0  # the start that was the newest then
        self._stands_by, self._max_standby, self._is_spare = False, max_standby, is_spare
        self._lease = 0
        self._lock = threading.Lock()  # of the lease
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None
        self._is_handed_over = False

    # What an agent tells the others, and hears; for what a store of torch's needs there is nothing here.

    def reserve(self) -> int:
        return 0

    def pasts(self, index: int) -> tuple[Past, ...]:
        del index
        return ()

    def agree(self, hosts: Sequence[Host], index: int, store: Any, prefix: str) -> None:
        """Agree with the start's hosts to begin it. Raises StoreGone if one is lost."""
        assert self._start is not None
        if tuple(host.agent for host in hosts) != self._start.agents:
            raise HostsError(f"Others than the agents of start {self._start.number} have met. {SAME}")
        text = f"{self._start.number} {self._fence}"
        self.guarded(lambda: agree(store, prefix, (index, len(hosts)), text, self.signature))

    def decline(self, store: Any, prefix: str, index: int) -> None:
        """Be no member any more; nobody waits for one that is none."""
        del store, prefix, index
        self.leave()

    def begin(self, met: Hosts, silent_are_dead: bool) -> None:
        """Begin the start. Raises Apart if its hosts do not reach each other."""
        del silent_are_dead
        if met.lost:
            names = ", ".join(map(met.name, sorted(met.lost)))
            raise Apart(f"all hosts see the coordination service, but from here not {names}")

    def failed(self, met: Hosts, leaving: Collection[int], silent_are_dead: bool) -> None:
        """Take note of how the last start has ended."""
        del silent_are_dead
        self._lost = frozenset(met.all[place].agent for place in met.lost | set(leaving))

    def guarded(self, call: Callable[[], Value]) -> Value:
        """Return what a call returns. Raises StoreGone if the service, or another agent, is lost in it."""
        try:
            return call()
        except (CoordinationError, ForeignError) as error:
            raise StoreGone(f"{error}.") from error

    def tell_health(self, why: str) -> None:
        """Let those that wait for hosts know why this one does not come; "": it is well, and comes."""
        key = f"unwell/{self.agent}"
        with suppress(CoordinationError):  # it is but a word to others
            if why:
                lease = self._service.lease(UNWELL_SECONDS)
                self._service.put_if(self._entries.write(key, [self._address, why]), {}, lease)
            else:
                self._service.put_if({self._entries.key(key): None}, {})

    def close(self) -> None:
        """The agent is done; `leave` says so, once it is known whether the job is."""

    def leave(self) -> None:
        """Be no member any more: no ranks run here. Where the service is silent the lease ends by itself."""
        if self._is_handed_over:
            return
        self._closing.set()
        if self._keeper is not None:
            self._keeper.join()
        if self._start is not None:
            self._after = self._start.number
        with suppress(CoordinationError):
            self._say_over()
            found = self._service.get(self._entries.key("root"))
            if self._entries.read(found, "root") == self.agent:
                root = self._entries.key("root")
                self._service.put_if({root: None}, {root: found.revision_of(root)})
            self._service.put_if({self._entries.key(f"members/{self.agent}"): None}, {})

    def take_place(self, met: Hosts, facts: JobFacts, reserve: Any) -> None:
        """Be the agent in whose place this one has come, which has a part in this start of the workers.

        It is a member by another's doing, until it comes to the next start.
        """
        del reserve
        # Who has come for the ranks of one that stays was no part of the meeting.
        agents = tuple(host.agent for host in met.all if host.ranks_of < 0)
        self.agent, self._fence = agents[met.index], facts.fence
        self._start = AgreedStart(facts.number, agents, 0)

    def hand_over(self) -> None:
        """The ranks of this host go on on another one, which is a member in this agent's place by now."""
        self._is_handed_over = True
        self._closing.set()

    def standbys(self) -> list[Standby]:
        """Return who stands by to take a host's place; nobody if the service does not say so."""
        try:
            return announced_at(self._service, self.signature)
        except CoordinationError:
            return []

    # What torch's agent asks.

    def get_backend(self) -> str:
        return "jitckpt"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return self.guarded(lambda: self._is_closed(self._service.get(self._meeting)))

    def set_closed(self) -> None:
        self.shutdown()

    def num_nodes_waiting(self) -> int:
        return 0  # who comes later stands by

    def shutdown(self) -> bool:
        """The job has ended: tell those that stand by, who wait for it as long as the job seems to be there.

        Returns whether it could be told, by right. A silent service is waited for, but not for ever.
        """
        if self._start is None or self._closing.is_set():  # the job goes on without this agent
            return False
        number = self._start.number
        closed = self._entries.write("closed", number) | self._entries.write("over", number)
        deadline, is_said = time.monotonic() + END_SECONDS, False
        while True:
            try:
                return self._service.put_if(closed, {self._entries.key("start"): self._fence}) is not None
            except CoordinationError as error:
                if time.monotonic() > deadline:
                    return False
                if not is_said:
                    is_said = True
                    say(
                        f"{error}. It is waited for at most {END_SECONDS:g} s, to say that the job has ended."
                    )
            time.sleep(LOOK_SECONDS)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next start that this agent has a part in.

        Raises RendezvousTimeoutError, NotNeeded if the job has ended, HostsError if others write there.
        """
        deadline, told = time.monotonic() + self._timeout, _without_detail(self._service.silence)
        if self._start is not None:
            self._after = self._start.number
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="jitckpt-lease", daemon=True)
            self._keeper.start()
        joined = False
        while True:
            try:
                joined = joined or self._come()
                info, why = self._look_for_start() if joined else (None, COMES_LATER)
                what = why
                if info is not None:
                    return info
            except LeaseLost:
                joined, why, what = False, "", ""
                self._forget_lease(self._lease)
            except CoordinationError as error:
                why = f"{error}."
                what = _without_detail(why)
            if why and what != told:
                told = what
                limit = "" if why == STANDS_BY else f" This agent waits for at most {self._timeout:g} s."
                say(f"{why}{limit}")
            if why == STANDS_BY:  # for as long as the job is there
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise RendezvousTimeoutError(why)

    def _come(self) -> bool:
        """Join the job's agents; return False where a spare does not yet."""
        if self._is_spare and self._entries.last(self._service.get(self._meeting)) is None:
            time.sleep(LOOK_SECONDS)
            return False
        self._say_over()
        self._join()
        return True

    def _look_for_start(self) -> tuple[RendezvousInfo | None, str]:
        """Return the next start, once it is there; else wait a little, and return what is to be told."""
        found = self._service.get(self._meeting)
        if self._is_closed(found):
            raise JobEnded
        last, over = self._entries.last(found), self._entries.read(found, "over")
        members = self._entries.members(found)
        if self._entries.key(f"members/{self.agent}") not in found.entries:
            raise LeaseLost("this agent is no member any more")
        if last is not None and last.number > self._after and self.agent in last.agents:
            return self._begin(last, found.revision_of(self._entries.key("start"))), ""
        is_over = self._silent_are_dead or (last is not None and over == last.number)
        root = self._entries.read(found, "root")
        keys = [self._entries.key(name) for name in ("start", "root")]
        looked = {key: found.revision_of(key) for key in keys}
        if root is None:
            self._service.put_if(self._entries.write("root", self.agent), looked, self._lease)
            return None, ""
        if root == self.agent:
            wanted = next_start(members, last, is_over, self._lost, self._hosts)
            if wanted is not None:
                told = [wanted.number, list(wanted.agents), wanted.step, self.agent]
                # With the start the root's part is done: it may be stopped, or cut off, by the next meeting.
                self._service.put_if(
                    self._entries.write("start", told) | {self._entries.key("root"): None}, looked
                )
                return None, ""
        if last is not None and not is_over and self._max_standby is not None:
            number = stands_by(members, last, self.agent)
            if number is not None and number >= self._max_standby:
                self.leave()
                raise NotNeeded(too_many(self._max_standby))
        why = ""
        if last is not None and not is_over and not any(agent in members for agent in last.agents):
            why = (
                f"start {last.number} of job {self._job!r} was not seen to end, and none of its agents is "
                "there: they may run, and be cut off. If you know that they are dead, add --silent-hosts "
                "dead; a new job needs another --rdzv-id."
            )
        elif last is None or is_over:
            why = self._entries.who_is_not_well(found)
        elif self.agent not in last.agents:
            why = STANDS_BY
            self.has_waited = True
            if not self._stands_by:
                self._stands_by = True
                self.on_standing_by()
        self._service.watch(self._meeting, found.revision, LOOK_SECONDS)
        return None, why

    def _begin(self, start: AgreedStart, fence: int) -> RendezvousInfo:
        self._start, self._fence, self._lost = start, fence, frozenset()
        store: Any = JobStore(
            self._service,
            f"{self._prefix}start-{start.number}/",
            fence=(self._entries.key("start"), fence),
            signature=self.signature,
            look=self._see_that_all_are_there,
            lease=self._own_lease,
        )
        # Where the workers meet is found when the agents have met.
        return RendezvousInfo(
            store, start.agents.index(self.agent), len(start.agents), RendezvousStoreInfo("", 0)
        )

    @property
    def start(self) -> AgreedStart | None:
        """The newest start that this agent has a part in."""
        return self._start

    @property
    def fence(self) -> int:
        """The revision of that start, which no other has."""
        return self._fence

    def _see_that_all_are_there(self) -> None:
        """Raise StoreGone if the start is over for one of its agents."""
        assert self._start is not None
        found = self._service.get(self._meeting)
        if found.revision_of(self._entries.key("start")) != self._fence:
            raise StoreGone(f"The job has gone on after start {self._start.number}.")
        members = self._entries.members(found)
        for place, agent in enumerate(self._start.agents):
            if agent not in members:
                raise StoreGone(f"The agent of host {place} is lost.")
            if members[agent].after >= self._start.number:
                raise StoreGone(f"Host {place} has left start {self._start.number}.")

    # What lies in the service.

    def _is_closed(self, found: Entries) -> bool:
        """Return whether the job has ended since this agent came; before, it was another run of it."""
        closed = self._entries.read(found, "closed")  # the number of its last start
        if closed is None or (self._resumes and closed <= self._came_after):
            return False
        return found.revision_of(self._entries.key("closed")) > self._joined

    def _say_over(self) -> None:
        """Say that the newest start of this agent is over, if no other has followed it."""
        if self._start is not None and self._after == self._start.number:
            over = self._entries.write("over", self._after)
            self._service.put_if(over, {self._entries.key("start"): self._fence})

    def _join(self) -> None:
        """Be a member, ready for the next start."""
        with self._lock:
            if not self._lease:
                self._lease = self._service.lease(self._lease_seconds)
            if not self._joined:
                last = self._entries.last(self._service.get(self._entries.key("start")))
                self._came_after = 0 if last is None else last.number
            own = Member(
                self._after,
                self._fixed_place,
                self._joined,
                self.newest_step(),
                self._address,
                self.newest_start,
                self.had_place,
            )
            revision = self._service.put_if(self._entries.member(self.agent, own), {}, self._lease)
            assert revision is not None  # without a condition
            self._joined = self._joined or revision

    def _own_lease(self) -> int:
        """Return the lease under which this agent puts what goes with it. Raises LeaseLost."""
        if not self._lease:
            raise LeaseLost("this agent's lease has ended, and it has no other yet")
        return self._lease

    def _forget_lease(self, lost: int) -> None:
        with self._lock:
            if self._lease == lost:
                self._lease = 0

    def _keep(self) -> None:
        """Keep the lease alive; make a new one where it has ended, as after a time without the service."""
        while not self._closing.wait(self._lease_seconds / KEPT):
            lease = self._lease
            with suppress(CoordinationError):  # the next time it may answer
                try:
                    if lease:
                        self._service.keep_alive(lease)
                except LeaseLost:
                    self._forget_lease(lease)
                    self._join()
