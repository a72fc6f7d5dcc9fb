"""A host's part in snapshots of a job, of which the job may be suspended: what is so on all hosts."""

import contextlib
import selectors
from abc import ABC, abstractmethod
from dataclasses import dataclass

from jitckpt.agent.migration.callers import STATUS_FAILED, Callers
from jitckpt.agent.migration.host_dumps import HostDumps
from jitckpt.agent.migration.move import MoveError
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.migration.suspended_job import SuspendedJob
from jitckpt.bindings.criu import CriuError
from jitckpt.system.job_socket import Caller
from jitckpt.wire.commands import Suspend, ToLauncher

FAILURES = (MoveError, CriuError, StoreError, OSError, RuntimeError)
DONE = 0  # a command's status


@dataclass(frozen=True)
class Place:
    """What this host goes on with if the job is suspended, and its number, of how many."""

    job: SuspendedJob
    number: int = 0
    hosts: int = 1


class HostPart(ABC):
    """What both the first host and the others are to their proxies, and to commands. Raises OSError."""

    next_look: float | None = None
    servers_stay = True

    def __init__(self, dumps: HostDumps, place: Place) -> None:
        self._dumps, self._place = dumps, place
        self._callers = Callers(dumps.shelf.directory, self._asked)
        self._awaits_end = False  # the job is suspended, and all hosts may know it by now
        self.suspended = False  # the launcher is to end

    @abstractmethod
    def look(self) -> None:
        """Do what the time has come for."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector's owner call what it finds as data when something comes."""
        self._callers.watch(selector)

    def close(self) -> None:
        """The ranks have ended."""
        self._dumps.drop()
        self._callers.close()

    def lose_host(self, host: int) -> bool:
        """Return whether the lost host is not missed, as the job is suspended."""
        del host
        self.suspended |= self._awaits_end
        return self._awaits_end

    def _asked(self, caller: Caller, asked: ToLauncher) -> None:
        match asked:
            case Suspend(to) if to:
                caller.hear(
                    "The job was not suspended: it goes to its own directory, where its snapshots are; leave "
                    "--to out.",
                    STATUS_FAILED,
                )
            case Suspend():
                if self._callers.waits is not None:
                    caller.hear("It is to be suspended already.", STATUS_FAILED)
                    return
                self._callers.waits = caller
                self._want_suspension()
            case _:
                caller.hear("The job was not resumed: It is not suspended.", STATUS_FAILED)

    @abstractmethod
    def _want_suspension(self) -> None:
        """Somebody asks this host for it."""

    def _await_end(self, step: int) -> None:
        """The job is suspended: leave what `jitckpt resume` needs."""
        self._awaits_end = True
        with contextlib.suppress(OSError):  # then the same command has it go on
            self._place.job.leave(self._dumps.shelf.directory, self._place.number, self._place.hosts, step)
