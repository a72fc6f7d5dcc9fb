"""Where a host waits to take another's place: at the store where hosts meet, or at a coordination service.

There it says where it can be called, and sees who else stands by, and when the job has ended. Once it has
taken a place it is that host there, too.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from jitckpt.decisions.meeting import Member
from jitckpt.errors import HostsError, HostsMissing, JobEnded
from jitckpt.hosts import rendezvous
from jitckpt.hosts.coordination import Coordination, CoordinationError, Entries
from jitckpt.hosts.leased_entries import LeasedEntries
from jitckpt.hosts.limited_calls import within
from jitckpt.hosts.meeting_entries import MeetingEntries
from jitckpt.hosts.signed import Signature
from jitckpt.hosts.standbys import Standby, announce, announced, announced_at, announcement, withdraw
from jitckpt.hosts.store_server import store_at

LOOK_SECONDS = 1.0


class WaitingPlace(Protocol):
    """Of one host that stands by."""

    def announce(self, own: Standby) -> None:
        """Say where this host can be called. Raises HostsError, JobEnded."""

    def others(self) -> list[Standby]:
        """Return who else stands by, the newest first; it may have ended since."""

    def look(self) -> None:
        """Raise JobEnded if the job is over, HostsMissing if nobody of it has been there for too long."""

    def take_place(self, agent: str) -> None:
        """Be what that agent was; nobody stands by here any more. agent: "" if that is there still."""

    def reserve(self) -> Any:
        """Return a store for the others to meet at should theirs be lost; None if that is none of theirs."""

    def leave(self) -> None:
        """The agent that has taken the place sees to itself from here on."""

    def close(self, *, handed_over: bool) -> None:
        """No ranks run here any more. handed_over: they do elsewhere, where somebody has taken this place."""


class AtStore:
    """At the store where the hosts meet. One host of the job holds it, and it goes with that."""

    def __init__(self, endpoint: str, signature: Signature, *, timeout: float, silence: float) -> None:
        """timeout: seconds in which the store is to be there. silence: in which it is to answer."""
        self._signature, self._silence = signature, silence
        self._store = _store(endpoint, timeout)
        self._reserve: Any = None

    def announce(self, own: Standby) -> None:
        self._own = own
        self._number: int = self._asked(partial(announce, self._store, self._signature, own))

    def others(self) -> list[Standby]:
        try:
            found: list[Standby] = within(self._silence, partial(announced, self._store, self._signature))
        except (RuntimeError, OSError):  # TimeoutError is an OSError
            return []
        return [one for one in found if one != self._own]

    def look(self) -> None:
        self._asked(partial(self._store.check, ["jitckpt"]))

    def take_place(self, agent: str) -> None:
        del agent  # of which the store knows nothing
        with suppress(JobEnded):  # who comes into a place finds by itself that all is over
            self._asked(partial(withdraw, self._store, self._signature, self._number))

    def reserve(self) -> Any:
        self._reserve = self._reserve or store_at(self._own.address)
        return self._reserve

    def leave(self) -> None:
        pass

    def close(self, *, handed_over: bool) -> None:
        del handed_over

    def _asked(self, call: Callable[[], Any]) -> Any:
        try:
            return within(self._silence, call)
        except (RuntimeError, OSError) as error:  # the store is gone
            raise JobEnded from error


def _store(endpoint: str, timeout: float) -> Any:
    host, port = parse_rendezvous_endpoint(endpoint, rendezvous.DEFAULT_PORT)
    until = time.monotonic() + timeout
    while True:
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            if time.monotonic() > until:
                raise HostsError(f"The job's store at {host}:{port} can't be reached: {error}") from error
            time.sleep(LOOK_SECONDS)


class AtService:
    """At a coordination service. The job is there for as long as one of its agents is."""

    def __init__(
        self, service: Coordination, signature: Signature, *, timeout: float, silence: float
    ) -> None:
        """timeout: seconds in which somebody of the job is to be there. silence: after which one is gone."""
        self._service, self._signature, self._timeout = service, signature, timeout
        self._entries = MeetingEntries(signature)
        self._leased = LeasedEntries(service, silence)
        self._came: int | None = None  # the revision at which this host did, once the service has answered
        self._until = time.monotonic() + timeout
        self._agent = ""  # in whose place this host is
        self._own: Standby | None = None
        with suppress(CoordinationError):
            self._came = service.get(self._entries.prefix).revision

    def announce(self, own: Standby) -> None:
        self._own = own
        put = announcement(self._signature, own)
        self._leased.keep({"standby": lambda lease: _put(self._service, put, lease)})

    def others(self) -> list[Standby]:
        try:
            found = announced_at(self._service, self._signature)
        except CoordinationError:
            return []
        return [one for one in found if one != self._own]

    def look(self) -> None:
        with suppress(CoordinationError):  # for as long as it is silent nobody knows
            found = self._service.get(self._entries.prefix)
            if self._came is None:
                self._came = found.revision
            if found.revision_of(self._entries.key("closed")) > self._came:
                raise JobEnded
            last, members = self._entries.last(found), self._entries.members(found)
            if last is not None and any(agent in members for agent in last.agents):
                self._until = time.monotonic() + self._timeout
        if time.monotonic() > self._until:
            raise HostsMissing(
                f"No host of job {self._signature.job!r} was there for {self._timeout:g} s, so this one does "
                "not stand by any more."
            )

    def take_place(self, agent: str) -> None:
        self._agent = agent
        entries: dict[str, Callable[[int], None]] = {"standby": lambda _: self._unannounce()}
        self._leased.keep(entries | ({"member": self._be_member} if agent else {}))

    def reserve(self) -> Any:
        return None

    def leave(self) -> None:
        self._leased.close()  # what is there stays until the lease ends, and the agent puts it anew
        self._agent = ""

    def close(self, *, handed_over: bool) -> None:
        self._leased.close()
        with suppress(CoordinationError, HostsError):
            if not self._agent:
                self._unannounce()
            elif not handed_over:
                self._say_over()

    def _unannounce(self) -> None:
        if self._own is not None:
            self._service.put_if(dict.fromkeys(announcement(self._signature, self._own)), {})

    def _be_member(self, lease: int) -> None:
        """Be there in the agent's place, so that nobody takes it for lost.

        It is not ready for another start before its ranks have ended.
        """
        found = self._service.get(self._entries.prefix)
        if (number := self._start(found)) is not None:
            assert self._own is not None
            member = Member(number - 1, None, 0, 0, self._own.address)
            self._service.put_if(self._entries.member(self._agent, member), self._fence(found), lease)

    def _say_over(self) -> None:
        """As an agent whose ranks have ended does."""
        found = self._service.get(self._entries.prefix)
        if (number := self._start(found)) is not None:
            gone: dict[str, bytes | None] = {self._entries.key(f"members/{self._agent}"): None}
            self._service.put_if(self._entries.write("over", number) | gone, self._fence(found))

    def _start(self, found: Entries) -> int | None:
        """Return the number of the newest start, if the agent has a part in it."""
        last = self._entries.last(found)
        return None if last is None or self._agent not in last.agents else last.number

    def _fence(self, found: Entries) -> dict[str, int]:
        key = self._entries.key("start")
        return {key: found.revision_of(key)}


def _put(service: Coordination, puts: dict[str, bytes | None], lease: int) -> None:
    service.put_if(puts, {}, lease)
