"""Torch's rendezvous with a store that may be lost: the agents that are left meet at another.

Every host has an empty store in reserve, and tells the others where. If the host with the store is lost, the
first of those that still see each other puts its own in its place, and all go there: those of the last start
know of each other's reserves, hosts that stand by read of them in the store while it is there, and who is
started anew at the old address finds a note in its store. No call to a store is waited for without a limit:
one to a process that is stopped never returns.

The store may be lost at any moment of a meeting, too: until the hosts of the next start are connected, each
goes by those of the last one that it still sees, and where their stores are.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.console import say
from jitckpt.decisions.quorum import may_go_on
from jitckpt.errors import HostsError, HostsMissing, JitckptError, JobEnded, NotNeeded
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.giving_way import give_way
from jitckpt.hosts.limited_calls import LOOK_SECONDS, THREAD_NAME, Value, watched, within
from jitckpt.hosts.rendezvous import (
    ANSWER_SECONDS,
    DEFAULT_PORT,
    SAME,
    agree,
    answers,
    decline,
    is_own_address,
    join_timeout,
    places,
    wishes_of,
)
from jitckpt.hosts.rendezvous_state import with_signature
from jitckpt.hosts.signed import ForeignError, Signature, Store
from jitckpt.hosts.standbys import Standby, announced
from jitckpt.hosts.store_server import store_at
from jitckpt.wire.checked import ProtocolError, part_of
from jitckpt.wire.hosts import HEARD, STORE, Host, Past
from jitckpt.wire.moves import JobFacts

REDIRECT_SECONDS = 2.0
GATHERING_SECONDS = 15.0  # for hosts to come together of which each has said that it is there
DEAD_SECONDS = (
    60.0  # that a host waits for others where too few are left, or none, and the rest is known to be dead
)
ALL_DEAD = (
    "All hosts that had the job's state are gone, as their machines say, and those that only stood by do not "
    "begin it anew. Start the job on all hosts again; it goes on from its newest save."
)
TAKES_A_PLACE = "it takes the place of one that is lost, when the others meet again"


def too_many(most: int) -> str:
    """Return why a host that would stand by is sent away."""
    return f"This host is not needed: as many stand by as are to (--max-standby {most})."


class StoreGone(JitckptError):
    """The store is lost, or the job has gone to another one."""


class Apart(JitckptError):
    """Hosts that have agreed on a start do not reach each other."""


@dataclass(frozen=True)
class StorePlace:
    """Where a store is."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Notes:
    """What a store says: where the job has gone, which start was the newest, its hosts' stores in reserve."""

    moved: StorePlace | None
    start: Past | None
    reserves: list[StorePlace]


@dataclass(frozen=True)
class LastStart:
    """The last start of the workers, as this host sees its other hosts since.

    leaving: hosts that have said that they end. silent_are_dead: the user knows that no host is only cut off.
    """

    start: Past
    met: Hosts
    leaving: frozenset[int]
    silent_are_dead: bool

    @property
    def together(self) -> set[int]:
        """The hosts that this one still sees, itself among them."""
        return set(range(self.start.hosts)) - self.met.lost - self.leaving

    @property
    def elected(self) -> int:
        """The host that gives the store, where the one that had it is lost."""
        return min(self.together)

    @property
    def ended(self) -> frozenset[int]:
        """The hosts that never come again."""
        lost = self.met.lost & set(range(self.start.hosts))  # another may have come for a host's ranks
        return self.leaving | lost if self.silent_are_dead else self.leaving

    @property
    def may_go_on(self) -> bool:
        """Whether those that still see each other may go on without the others."""
        return may_go_on(self.start.hosts, self.ended, self.together, self.start.holder)

    @property
    def may_move(self) -> bool:
        """Whether they may do so at another store: two hosts are too few to know who else does."""
        return self.may_go_on and (self.start.hosts > 2 or self.silent_are_dead)


class LastingRendezvous(RendezvousHandler):
    """Torch's rendezvous of several hosts, wherever its store is just now."""

    meets_at_once = False  # the same hosts meet sooner without it
    is_taking_in = False  # the next meeting is with hosts that are there already

    def __init__(
        self,
        config: LaunchConfig,
        inner: RendezvousHandler,
        patience: float,
        fixed_place: int | None = None,
        secret: bytes | None = None,
        *,
        max_standby: int | None = None,
        is_spare: bool = False,
    ) -> None:
        """inner: torch's handler with the store at the endpoint. patience: seconds for a store's answer.

        fixed_place: of this host among all, None for any. secret: the job's, if the hosts were given one.
        is_spare: it has no part in the first start.
        """
        self._config, self._patience, self._fixed_place = config, patience, fixed_place
        self.signature = Signature(config.run_id, secret)
        self.agent = secrets.token_hex(8)  # by which the others know this one in all meetings
        self._is_spare = is_spare
        self.inner: Any = self._mine(inner)
        assert config.local_addr is not None  # `jitckpt run` finds it out
        self._address = config.local_addr
        self._origin = StorePlace(*parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT))
        self._place = self._origin
        self.has_store = is_own_address(self._origin.address)
        self._reserve: Any = None
        self._kept: list[Any] = []  # stores that others may still ask for the way
        self._reserves: list[StorePlace] = []  # of the hosts of the newest start that is known
        self._moved: StorePlace | None = None  # where a note in the store says that the job is
        self.on_standing_by: Callable[[], None] = lambda: None  # called once, if this host does
        self.has_waited = False  # until a job that was there already has taken it
        self.start: Past | None = None  # the newest that has begun here, or elsewhere and goes on here
        self._last: LastStart | None = None  # the same, if it has failed
        self._agreed: list[Past] = []  # the newest to which all have, and those after it that are in doubt
        self._heard: Past | None = None  # the newest that a store has told of
        self._client: Any = None
        self._left = False
        self._stands_by, self._max_standby = False, max_standby
        self._waits = False  # for the job to take it in
        self._dead_since: float | None = None  # all hosts of a job that has not ended
        self._closing = threading.Event()

    # What an agent tells the others, and hears.

    def reserve(self) -> int:
        """Have a store in reserve; return its port."""
        if self._reserve is None:  # else it stays where the others know it
            self._reserve = store_at(self._address)
        return int(self._reserve.port)

    def pasts(self, index: int) -> tuple[Past, ...]:
        """Return what this host has to tell at a meeting; the first tells what the store knows, too."""
        own, last = list(self._agreed), self._last
        if last is not None:
            ended = tuple(sorted(last.ended))
            own = [replace(past, ended=ended) if past.start == last.start.start else past for past in own]
        elif not own and self._heard is not None:
            own = [replace(self._heard, place=HEARD)]
        told = self.guarded(self._read).start if index == 0 else None
        return (*own, *([] if told is None else [told]))

    def agree(self, hosts: Sequence[Host], index: int, store: Store, prefix: str) -> None:
        """Agree with these hosts to start, if all of them do. Raises StoreGone and DistError."""
        told = json.dumps([(host.address, host.port) for host in hosts])
        store_at_host = next((place for place, host in enumerate(hosts) if host.has_store), -1)
        # Two that are left of more may have a store that has moved before: then it is not true that whoever
        # has the first address has taken its place, and only the store itself can tell who goes on.
        two_of_more = len(hosts) == 2 < self._config.max_nodes
        holder = -1 if two_of_more else store_at_host
        number = 1 + max((past.number for host in hosts for past in host.pasts), default=-1)
        start = Past(sha256(told.encode()).hexdigest(), number, len(hosts), index, holder)
        # Whatever comes of it: the others may go on, counting on this host.
        self._agreed.append(replace(start, in_doubt=tuple(host.agent for host in hosts)))
        self.guarded(lambda: agree(store, prefix, (index, len(hosts)), start.start, self.signature))
        self._agreed, self.has_store = [start], index == store_at_host
        # For those that stand by. Each host writes it before its ranks start, so where new hosts meet while
        # some of these may run, the new ones know.
        self.guarded(lambda: self._tell_store(start, _reserves(hosts)))

    def decline(self, store: Store, prefix: str, index: int) -> None:
        """Leave, and tell those that would wait for this host when they meet again."""
        with suppress(DistError, StoreGone):  # without the store they go the long way by themselves
            self.guarded(lambda: decline(store, prefix, index, self.signature))
        self._leave()

    def begin(self, met: Hosts, silent_are_dead: bool) -> None:
        """Begin the start that was agreed on, with its hosts connected.

        Raises Apart if those that are connected are too few to go on without the others: some of those may
        not know that all have agreed, and look for the others at the last start's places.
        """
        (start,) = self._agreed
        now = LastStart(start, met, frozenset(), silent_are_dead)
        if not now.may_go_on:
            raise Apart(f"of {start.hosts} hosts that agreed to start only {len(now.together)} are left")
        self.start, self._last, self._reserves = start, None, _reserves(met.all)

    def failed(self, met: Hosts, leaving: Collection[int], silent_are_dead: bool) -> None:
        """Take note of how the last start has ended. leaving: hosts that have said that they end."""
        assert self.start is not None
        self._last = LastStart(self.start, met, frozenset(leaving), silent_are_dead)
        self._reserves = _reserves(met.all)  # another host may have come in the place of one

    def take_place(self, met: Hosts, facts: JobFacts, reserve: Any) -> None:
        """Be the host in whose place this one has come. reserve: the store that the others know of."""
        assert facts.past is not None
        self.agent = met.all[met.index].agent
        self.inner = self._mine(self.inner)
        self.start, self._agreed, self._reserve = facts.past, [facts.past], reserve
        self.has_store = False
        with suppress(RuntimeError, OSError):  # it may be lost just now
            within(self._patience, partial(self._tell_store, facts.past, _reserves(met.all)))

    def close(self) -> None:
        """Show nobody the way any more."""
        self._closing.set()

    def standbys(self) -> list[Standby]:
        """Return who stands by; nobody if the store does not say so in time."""
        try:
            client = self._connect(self._place)
            return within(self._patience, partial(announced, client, self.signature))
        except (RuntimeError, OSError):  # TimeoutError is an OSError
            return []

    def waiting(self) -> frozenset[str]:
        """Return who waits to be taken in, by names; nobody if the store does not say so in time.

        To be asked while the ranks run.
        """
        inner = self.inner

        def look() -> frozenset[str]:
            inner.num_nodes_waiting()
            state = inner._state_holder.state
            # On a machine under load all that run may have been taken for dead. Torch then begins another
            # meeting, and who is there waits for them, as they do not know of it.
            there = [] if state.complete else state.participants
            return frozenset(map(str, {*state.wait_list, *there}))

        try:
            return within(self._patience, look)
        except (RuntimeError, OSError, RendezvousError):
            return frozenset()

    def leave(self) -> None:
        """Do nothing with the rendezvous any more, which goes on without this host."""
        self._leave()

    def hand_over(self) -> None:
        """The ranks of this host go on on another one."""
        with suppress(RuntimeError, OSError, RendezvousError):  # else the others wait until it seems dead
            within(self._patience, self.inner.step_out)
        self._leave()

    # What torch's agent asks.

    def get_backend(self) -> str:
        return str(self.inner.get_backend())

    @property
    def use_agent_store(self) -> bool:
        return bool(self.inner.use_agent_store)

    def get_run_id(self) -> str:
        return self._config.run_id

    def is_closed(self) -> bool:
        return bool(self.guarded(self.inner.is_closed))

    def set_closed(self) -> None:
        self.guarded(self.inner.set_closed)

    def num_nodes_waiting(self) -> int:
        return int(self.guarded(self.inner.num_nodes_waiting))

    def shutdown(self) -> bool:
        """Close the rendezvous, if its store is there. A host that only stood by ends nobody's job."""
        if self.start is None and self._heard is not None and not self._left:
            self._leave()
        try:
            return not self._left and within(self._patience, self.inner.shutdown)
        except TimeoutError:
            return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other hosts.

        Raises HostsError if there is no store to meet at for `join_timeout`, NotNeeded if the job has ended.
        """
        while True:
            if self._left or self._last is not None:
                self._find()
            # Torch would go on with the address of a host that may be gone, and the keys of workers that are.
            self.inner._bootstrap_store_info = None
            if self._config.min_nodes < self._config.max_nodes:
                self.inner.wait_for_missing(GATHERING_SECONDS if self.is_taking_in else None)
            try:
                info: RendezvousInfo = self.guarded(self.inner.next_rendezvous)
                self._waits = self.is_taking_in = False
                return self.guarded(partial(self._in_place, info))
            except StoreGone:
                self._leave()
            except RendezvousGracefulExitError as error:
                raise JobEnded from error
            except RendezvousClosedError as error:
                came_too_late = self.start is None and self._heard is not None
                if self._waits or came_too_late:
                    raise JobEnded from error
                raise
            except RendezvousTimeoutError:
                is_there = self.inner._state_holder.state.complete or self._lives()
                if not (self._waits and is_there):
                    raise  # else the job is there, and takes it in when it may

    def _in_place(self, info: RendezvousInfo) -> RendezvousInfo:
        """Put this host where its user wants it, else where it was; torch sorts hosts by their addresses."""
        key, last, most = "jitckpt/fixed-place", self._last, self._config.max_nodes
        store: Any = info.store
        before = last.start.place if last is not None and last.start.hosts == most else None
        self.signature.put(store, f"{key}/{info.rank}", [self._fixed_place, before])
        try:
            told = [self.signature.take(store, f"{key}/{rank}") for rank in range(info.world_size)]
        except ForeignError as error:
            raise HostsError(f"Which host has which place can't be read: {error}. {SAME}") from error
        rank = places(wishes_of(told, most), most)[info.rank]
        bootstrap: Any = info.bootstrap_store_info
        return RendezvousInfo(info.store, rank, info.world_size, bootstrap)

    def guarded(self, call: Callable[[], Value]) -> Value:
        """Return what a call to the store returns. Raises StoreGone if the store is lost in the meantime."""
        answer = watched(call, self._look)
        try:
            return answer()
        except Exception:
            self._look()
            raise

    # Who comes first to a meeting: those that have the job's state.

    def _mine(self, torchs: RendezvousHandler) -> RendezvousHandler:
        """Return torch's handler as this host uses it."""
        signed = with_signature(torchs, self.signature, self.agent)
        if isinstance(signed, DynamicRendezvousHandler):
            give_way(signed, self._gives_way)
        return signed

    def _gives_way(self, store: Any, there: Collection[str]) -> bool:
        """Return whether this host, which has nothing of the job, waits for those that have.

        there: the agents that take part in the meeting by now.
        """
        start = self._note(store, "start", _start)
        if start is None:
            return self._is_spare
        if any(own.start == start[0].start for own in self._agreed):
            return False
        living = self._note(store, "living", _agents)
        return not living or not living.issubset(there)

    def _tell_living(self, client: Any) -> None:
        """Tell those that stand by for which hosts of the last start, which has failed, they have to wait.

        Who was cut off from that start's followers has nothing to tell.
        """
        told, last = self._note(client, "start", _start), self._last
        if last is None or (told is not None and all(own.start != told[0].start for own in self._agreed)):
            return
        agents = [last.met.all[place].agent for place in sorted(last.together)]
        self.signature.put(client, self._key("living"), agents)

    def _see_that_one_lives(self, reserves: Collection[StorePlace]) -> None:
        """Raise HostsMissing if all hosts that have the job's state have been dead for long.

        As their machines say: one that is silent may be cut off.
        """
        if not reserves or self.inner._state_holder.state.complete or not all(map(is_closed, reserves)):
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > DEAD_SECONDS:
            raise HostsMissing(ALL_DEAD)

    def _lives(self) -> bool:
        """Return whether any host of the newest start is there, as far as this one can see."""
        return any(place.port > 0 and answers(place.address, place.port) for place in self._reserves)

    # How a store is found.

    def _key(self, name: str) -> str:
        return f"jitckpt/{self._config.run_id}/{name}"

    def _look(self) -> None:
        """Read what the store says of itself and others. Raises StoreGone if it is lost, or not the job's."""
        try:
            notes = within(self._patience, self._read)
        except (RuntimeError, OSError) as error:  # TimeoutError is an OSError
            self._client = None
            raise StoreGone(f"The store at {self._place} does not answer.") from error
        if notes.start is not None and not self._stands_by and self._is_redundant():
            self._stands_by = self.has_waited = True
            say("this host stands by: it takes the place of one that is lost.")
            self.on_standing_by()
        # Those that were in the newest start are there for a moment, too, as they meet again.
        others = notes.start is not None and (self.start is None or notes.start.start != self.start.start)
        if others:
            self._see_that_one_lives(notes.reserves)
        if others and not self._waits and self._is_waiting():
            self._waits = self.has_waited = True
            self.inner.wait_for_missing(GATHERING_SECONDS)
            lasts = self._config.min_nodes < self._config.max_nodes  # the job, without hosts
            then = "the job goes on without it, and takes it in at the end of a step"
            say(f"this host waits: {then if lasts else TAKES_A_PLACE}.")
        if self._stands_by and self._max_standby is not None:
            waiting = sorted(self.inner._state_holder.state.redundancy_list)
            if self.inner._this_node in waiting[self._max_standby :]:
                self._leave()
                raise NotNeeded(too_many(self._max_standby))
        self._reserves, self._heard = notes.reserves or self._reserves, notes.start or self._heard
        if notes.moved is not None and notes.moved != self._place:
            self._moved = notes.moved
            raise StoreGone(f"The job has gone to the store at {notes.moved}.")

    def _read(self) -> Notes:
        # A connection of its own: one that waits for a key answers nothing else.
        client = self._client = self._client or self._connect(self._place)
        self._tell_living(client)
        moved = self._note(client, "moved", _place)
        start, reserves = self._note(client, "start", _start) or (None, [])
        return Notes(moved, start, reserves)

    def _note(self, client: Any, name: str, parse: Callable[[Any], Value]) -> Value | None:
        """Return what an agent of the job has left in a store; None if there is nothing, or a stranger's."""
        key = self._key(name)
        return self._parsed(key, client.get(key), parse) if client.check([key]) else None

    def _parsed(self, key: str, entry: bytes, parse: Callable[[Any], Value]) -> Value | None:
        with suppress(ForeignError, ProtocolError, KeyError, TypeError, ValueError):
            return parse(self.signature.read(key, entry))
        return None

    def _tell_store(self, start: Past, reserves: Sequence[StorePlace]) -> None:
        """Leave word of a start, unless there is some of a later one, or the same of this one."""
        key, store, known = self._key("start"), self.inner._store, b""
        told = self.signature.write(key, _told(start, reserves))

        def is_older(there: Past, theirs: Sequence[StorePlace]) -> bool:
            return there.number < start.number or (there.start == start.start and theirs != [*reserves])

        while (found := self._parsed(key, known, _start)) is None or is_older(*found):
            try:
                known = store.compare_set(key, known.decode(), told)
            except UnicodeDecodeError:  # which no agent has written
                store.set(key, told)
                return

    def _is_waiting(self) -> bool:
        return self.inner._this_node in self.inner._state_holder.state.wait_list

    def _is_redundant(self) -> bool:
        return self.inner._this_node in self.inner._state_holder.state.redundancy_list

    def _connect(self, place: StorePlace) -> Any:
        if is_closed(place):  # torch would try again until the time is up
            raise ConnectionRefusedError(f"nobody listens at {place}")
        seconds = timedelta(seconds=self._patience)
        return TCPStore(place.address, place.port, None, False, seconds, wait_for_workers=False)

    def _other_store(self) -> StorePlace | None:
        """Return where others of the last start meet, if this host gives way to them.

        Where a link between two hosts was cut, both may have given a store, each with those that it saw. Who
        comes first among the hosts keeps it, unless the others have started again meanwhile.
        """
        if (last := self._last) is None:
            return None
        own = last.start
        for place, host in enumerate(last.met.all):
            there = StorePlace(host.address, host.reserve)
            if place == own.place or host.reserve <= 0 or not answers(there.address, there.port):
                continue
            with suppress(RuntimeError, OSError):
                told = within(self._patience, partial(self._start_at, there))
                if told is not None and (-told.number, place) < (-own.number, own.place):
                    return there
        return None

    def _start_at(self, place: StorePlace) -> Past | None:
        told = self._note(self._connect(place), "start", _start)
        return None if told is None else told[0]

    def _is_job_at(self, place: StorePlace) -> bool:
        """Return whether the job's hosts have met at this store, or have been called there."""
        try:
            return answers(place.address, place.port) and within(
                self._patience, lambda: bool(self._connect(place).check([self._key("start")]))
            )
        except (RuntimeError, OSError):
            return False

    def _find(self) -> None:
        """Go to the store where the others are, or will be."""
        timeout = join_timeout(self._config)
        begun, told = time.monotonic(), False
        alone_since: float | None = None
        while (place := self._next_place()) is None or not self._go(place):
            if not self._left and is_closed(self._place):
                self._leave()  # else torch complains of each heartbeat, for as long as this waits
            if not told:
                told = True
                say(f"{self._why_it_waits()} It waits for at most {timeout:g} s.")
            now = time.monotonic()
            alone_since = (now if alone_since is None else alone_since) if self._is_alone() else None
            if alone_since is not None and now - alone_since > DEAD_SECONDS:
                raise HostsMissing(
                    "The other hosts are dead, as their machines say, and this one may not go on alone: new "
                    "ones may have gone on with them. Start the job on all hosts again; it goes on from its "
                    "newest save."
                )
            if now - begun > timeout:
                raise HostsMissing(
                    f"In {timeout:g} s no host with the address {self._origin.address} has come, and none "
                    "has been found that the job goes on with. Start the job on all hosts again, with an "
                    "--rdzv-endpoint that is one of them; it goes on from its newest save."
                )
            time.sleep(LOOK_SECONDS)

    def _next_place(self) -> StorePlace | None:
        """Return the store to go to, None if there is none yet."""
        is_here, last = self._is_job_at(self._place), self._last
        if is_here:
            try:
                self._look()
            except StoreGone:  # it may have a note
                is_here = False
        elif last is None and self._reserves and all(map(is_closed, self._reserves)):
            if self._dead_since is not None:
                raise HostsMissing(ALL_DEAD)
            raise JobEnded
        if is_here and (last is None or last.may_go_on or not self.has_store):
            return self._place  # where these are too few they are told so when they meet
        if self._moved not in (None, self._place) and self._is_job_at(self._moved):
            return self._moved  # and no other store is given, at which this host would wait alone
        may_move = last is not None and last.may_move
        if last is not None and may_move and last.elected == last.start.place:
            return self._give_store(last.start)
        for place in self._reserves:
            if place not in (self._place, self._reserved()) and self._is_job_at(place):
                return place
        if is_here or may_move or not answers(self._origin.address, self._origin.port):
            return None
        return self._origin  # another host has taken the address

    def _is_alone(self) -> bool:
        """Return whether none of the last start's other agents can be waited for, nor a new one is there.

        A machine that lives says so of an agent that is dead; one that is cut off says nothing. Those that
        may go on without the others wait for new ones, for as long as their user wants.
        """
        last = self._last
        if last is None or last.may_go_on:
            return False
        others = [host for place, host in enumerate(last.met.all) if place != last.start.place]
        if not all(host.reserve > 0 and is_closed(StorePlace(host.address, host.reserve)) for host in others):
            return False
        return self.has_store or is_closed(self._origin)

    def _why_it_waits(self) -> str:
        lost = f"the host that held the rendezvous' store at {self._place} is gone"
        if self._last is None:
            return f"{lost}, and no other store is known yet."
        if self._last.may_move:
            return f"{lost}; {self._last.met.name(self._last.elected)} gives another, and is not ready yet."
        if self._last.may_go_on:
            return (
                f"{lost}, or cut off. Start the same command on it, or on another that takes the address "
                f"{self._origin.address}."
            )
        seen, all_hosts = len(self._last.together), self._last.start.hosts - len(self._last.ended)
        return (
            f"this host sees {seen} of {all_hosts} hosts that may be alive. The others may go on without it, "
            "so it does not go on before it sees them again (--silent-hosts dead: a silent host is dead)."
        )

    def _reserved(self) -> StorePlace | None:
        return None if self._reserve is None else StorePlace(self._address, self._reserve.port)

    def _give_store(self, start: Past) -> StorePlace | None:
        self.signature.put(self._reserve, self._key("start"), _told(start, self._reserves))
        place = self._reserved()
        say(
            f"the host that held the rendezvous' store at {self._place} is gone. The store is at {place} "
            f"now: hosts that are started from now on need --rdzv-endpoint {place}, or the address "
            f"{self._origin.address}."
        )
        return place

    def _is_connected(self) -> bool:
        try:
            within(self._patience, lambda: self.inner._store.check(["jitckpt"]))
        except (RuntimeError, OSError):
            return False
        return True

    def _go(self, place: StorePlace) -> bool:
        """Take part in torch's rendezvous at this store from now on; return whether it answers."""
        if place == self._place and not self._left and self._is_connected():
            return True
        gives = place == self._reserved()
        try:
            store = self._reserve if gives else within(self._patience, lambda: self._connect(place))
            backend = within(self._patience, lambda: C10dRendezvousBackend(store, self._config.run_id))
        except (RuntimeError, OSError, RendezvousConnectionError):
            return False
        if not self._left:
            self._leave()
        self.inner = self._mine(create_handler(store, backend, _parameters(self._config)))
        self._place, self._left, self.has_store = place, False, gives
        if gives:
            self._reserve = None
            threading.Thread(target=self._redirect, name=THREAD_NAME, daemon=True).start()
        return True

    def _leave(self) -> None:
        """Do nothing any more with a store that is lost, or that nobody will come to."""

        def refuse(*_: Any) -> None:
            raise RendezvousConnectionError("This agent has left this store.")

        self._left, self._client = True, None  # a client may hang
        inner = self.inner
        inner._state_holder._backend._call_store = refuse  # a thread may wait there for others
        self._kept.append(inner._store)
        # Its heartbeats may hang in a connection to nobody: nobody waits for them.
        threading.Thread(target=inner._stop_heartbeats, name=THREAD_NAME, daemon=True).start()

    def _redirect(self) -> None:
        """While this host gives the store, leave a note where one is started at the job's first address.

        And in its own, should others of the last start meet elsewhere.
        """
        place = self._place
        while self._place == place and not self._closing.is_set():
            if (elsewhere := self._other_store()) is not None:
                note = [elsewhere.address, elsewhere.port]
                with suppress(RuntimeError, OSError):
                    self.signature.put(self._connect(place), self._key("moved"), note)
            if answers(self._origin.address, self._origin.port):
                note = [place.address, place.port]
                with suppress(RuntimeError, OSError):  # it has ended just now; another may come
                    self.signature.put(self._connect(self._origin), self._key("moved"), note)
            self._closing.wait(REDIRECT_SECONDS)


def _reserves(hosts: Sequence[Host]) -> list[StorePlace]:
    return [StorePlace(host.address, host.reserve) for host in hosts]


def _told(start: Past, reserves: Sequence[StorePlace]) -> dict[str, Any]:
    """Return what a store says of a start."""
    places = [(place.address, place.port) for place in reserves]
    return {"start": asdict(replace(start, place=STORE)), "reserves": places}


def _start(told: Any) -> tuple[Past, list[StorePlace]]:
    return part_of(Past, told["start"], "start"), [_place(place) for place in told["reserves"]]


def _agents(told: Any) -> set[str]:
    return {part for part in told if isinstance(part, str)}


def _place(told: Any) -> StorePlace:
    match told:
        case [str(address), int(port)] if 0 <= port < 1 << 16:
            return StorePlace(address, port)
    raise ValueError(f"{told!r:.80} is no place of a store")


def is_closed(place: StorePlace) -> bool:
    """Return whether nobody listens there: the machine itself has to say so."""
    try:
        socket.create_connection((place.address, place.port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # it may be cut off
    return False


def _parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
