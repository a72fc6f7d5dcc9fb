"""What befalls hosts that meet at etcd, and its members: killed, stopped, cut off, with another time of day.

All but a death is undone after a while.
"""

import abc
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from campaign.etcd_members import FROM_MEMBER, TO_MEMBER, EtcdMembers
from campaign.runs_on_hosts import CLOCK_LIBRARY, HostStrike, JobOnHosts
from jitckpt.bindings import clock
from jitckpt.errors import HostsError
from jitckpt.rehearsal.namespaces import EVERYTHING

IN, OUT, BOTH = "in", "out", "both"  # what is cut: what comes to a host, what goes from it


@dataclass(frozen=True)
class AgentDies(HostStrike):
    """The agent is killed alone, and the same command is started there when its ranks have ended."""

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen."""
        member = _members(job).pid(self.rank)
        job.lose_agent(self.rank, lambda pid: pid == member)
        job.start(self.rank)

    def _what(self) -> str:
        return "loses its agent"


@dataclass(frozen=True)
class Lasting(HostStrike, abc.ABC):
    """What is undone after some seconds. rank: the host."""

    seconds: float = 1.0

    def befall(self, job: JobOnHosts) -> None:
        """Let it happen, and undo it; a job that has ended meanwhile is not waited for."""
        with self.going_on(job):
            job.over.wait(self.seconds)

    @abc.abstractmethod
    def going_on(self, job: JobOnHosts) -> contextlib.AbstractContextManager[None]:
        """Do it, and undo it in the end."""

    def _what(self) -> str:
        return f"{self._does()} for {self.seconds:g} s"

    @abc.abstractmethod
    def _does(self) -> str: ...


@dataclass(frozen=True)
class Stops(Lasting):
    """The agent stands still, or all processes of its host, with its member of etcd. whole: these."""

    whole: bool = False

    @contextlib.contextmanager
    def going_on(self, job: JobOnHosts) -> Iterator[None]:
        processes = job.hosts.processes(self.rank) if self.whole else [job.agents[self.rank].pid]
        with _stopped(processes):
            yield

    def _does(self) -> str:
        return "stands still" if self.whole else "has an agent that stands still"


@dataclass(frozen=True)
class CutOff(Lasting):
    """Nothing comes to a host, or goes from it, or both, and nobody is told."""

    way: str = BOTH

    @contextlib.contextmanager
    def going_on(self, job: JobOnHosts) -> Iterator[None]:
        incoming = EVERYTHING if self.way in (IN, BOTH) else ()
        outgoing = EVERYTHING if self.way in (OUT, BOTH) else ()
        with job.hosts.cut_off(self.rank, incoming, outgoing):
            yield

    def _does(self) -> str:
        return f"is cut off ({self.way})"


@dataclass(frozen=True)
class ClockJumps(Lasting):
    """The time of day jumps by some seconds, for the agent and all that it has started, and back again."""

    jump: int = clock.HOUR

    @contextlib.contextmanager
    def going_on(self, job: JobOnHosts) -> Iterator[None]:
        hit = [pid for pid in job.hosts.processes(self.rank) if _jumps(pid, self.jump)]
        if not hit:
            raise HostsError(f"No process of host {self.rank} has {CLOCK_LIBRARY}: its clock stays.")
        try:
            yield
        finally:
            for pid in hit:
                _jumps(pid, -self.jump)

    def _does(self) -> str:
        return f"has a clock that is {self.jump:+d} s off"


@dataclass(frozen=True)
class OfMember(Lasting):
    """It befalls a member of etcd alone: the one on this host, or the one that leads then."""

    leader: bool = False

    @contextlib.contextmanager
    def going_on(self, job: JobOnHosts) -> Iterator[None]:
        found = _members(job).leader() if self.leader else None
        with self.member_hit(job, self.rank if found is None else found):
            yield

    @abc.abstractmethod
    def member_hit(self, job: JobOnHosts, host: int) -> contextlib.AbstractContextManager[None]:
        """Do it to the member of this host, and undo it in the end."""

    def __str__(self) -> str:
        text = super().__str__()
        return text.replace(
            f"host {self.rank}", "the leading member" if self.leader else f"member {self.rank}"
        )


@dataclass(frozen=True)
class MemberDies(OfMember):
    """It is killed, and started again."""

    @contextlib.contextmanager
    def member_hit(self, job: JobOnHosts, host: int) -> Iterator[None]:
        _members(job).kill(host)
        try:
            yield
        finally:
            _members(job).start(host)

    def _does(self) -> str:
        return "is dead"


@dataclass(frozen=True)
class MembersStop(OfMember):
    """It stands still, or it and another one, so that no majority is left. two: these."""

    two: bool = False

    @contextlib.contextmanager
    def member_hit(self, job: JobOnHosts, host: int) -> Iterator[None]:
        others = [(host + 1) % len(job.hosts.names)] if self.two else []
        processes = [_members(job).pid(one) for one in (host, *others)]
        with _stopped(processes):
            yield

    def _does(self) -> str:
        return "stands still, with the next one," if self.two else "stands still"


@dataclass(frozen=True)
class MemberCutOff(OfMember):
    """Nothing comes to it from other hosts, or goes from it, or both."""

    way: str = BOTH

    @contextlib.contextmanager
    def member_hit(self, job: JobOnHosts, host: int) -> Iterator[None]:
        incoming = TO_MEMBER if self.way in (IN, BOTH) else ()
        outgoing = FROM_MEMBER if self.way in (OUT, BOTH) else ()
        with job.hosts.cut_off(host, incoming, outgoing):
            yield

    def _does(self) -> str:
        return f"is cut off ({self.way})"


@contextlib.contextmanager
def _stopped(processes: list[int]) -> Iterator[None]:
    _signal_all(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_all(processes, signal.SIGCONT)


def _members(job: JobOnHosts) -> EtcdMembers:
    assert job.etcd is not None, "the job meets at etcd"
    return job.etcd


def _signal_all(processes: list[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _jumps(pid: int, seconds: int) -> bool:
    """Let a process's time of day jump; return whether it has what that takes."""
    try:
        clock.jump_of(pid, str(CLOCK_LIBRARY), seconds)
    except (FileNotFoundError, ProcessLookupError, clock.ClockError):
        return False  # it has ended, just begins, or is none of Python's
    return True
