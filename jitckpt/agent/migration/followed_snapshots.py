"""A host's part in snapshots of a job, of which the job may be suspended, where another host leads them."""

import contextlib
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from jitckpt.agent.migration.callers import STATUS_FAILED, Callers
from jitckpt.agent.migration.host_dumps import HostDumps
from jitckpt.agent.migration.move import MoveError
from jitckpt.agent.migration.shelf import Size
from jitckpt.agent.migration.store_relay import StoreError
from jitckpt.agent.migration.suspended_job import SuspendedJob
from jitckpt.agent.proxies.control import LEADER
from jitckpt.bindings.criu import CriuError
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.system.job_socket import Caller
from jitckpt.wire import agents
from jitckpt.wire.agents import AgentMessage
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


class FollowedSnapshots(HostPart):
    """On a host that is not the first: does what that one asks for."""

    def __init__(self, dumps: HostDumps, place: Place, hosts: Hosts) -> None:
        super().__init__(dumps, place)
        self._hosts = hosts
        self._name, self._step = "", 0

    def look(self) -> None:
        """Nothing depends on the time."""

    def note(self, event: str, details: Mapping[str, object]) -> None:
        """Nothing is agreed on here."""

    def carry_out(self, go_on: Callable[[], None]) -> None:
        """The first host says when."""
        raise RuntimeError("the first host alone knows that all ranks rest")

    def hear_host(self, arrived: Arrived) -> None:
        """Take in what another agent says. Raises KeyError if it is not for it to say."""
        if arrived.host != LEADER:
            raise KeyError(f"host {arrived.host} does not lead snapshots")
        dumps = self._dumps
        match arrived.message:
            case agents.AskSnapshot(number):
                never = dumps.why_never()
                why = never or (dumps.why_no_room() if dumps.is_ready else "")
                answer = agents.SnapshotAnswer(number, dumps.place.steps, dumps.bytes)
                self._say(replace(answer, ready=dumps.is_ready, why=why, never=bool(never)))
            case agents.WaitBehind(number, step):
                dumps.place.want(step)
                if step:
                    self._say(agents.SnapshotAnswer(number, dumps.place.steps))
            case agents.DumpRanks(name, step):
                self._dump(name, step)
            case agents.SnapshotTaken(name, made) if name == self._name:
                if made:
                    dumps.put({"name": name, "rest": {}, "store": {}}, partial(self._is_put, name))
                else:
                    dumps.drop()
            case agents.SnapshotWhole(name, made, ends) if name == self._name:
                dumps.shelf.all_have() if made else dumps.shelf.not_all_have()
                if ends:
                    self._await_end(self._step)
                    self._say(agents.EndAwaited(name))
            case agents.SuspensionSays(text, status):
                self._callers.tell(text, status)
                self.suspended |= status == DONE
            case agents.ForgetSnapshots():
                dumps.shelf.settle()
                dumps.shelf.forget()

    def _want_suspension(self) -> None:
        self._say(agents.AskSuspension())

    def _dump(self, name: str, step: int) -> None:
        why, keys = "", set[bytes]()
        try:
            self._dumps.dump(step)
            keys = self._dumps.mover.relay.written
        except FAILURES as error:
            why = str(error)
        self._name, self._step = name, step
        data = b"\n".join(key.hex().encode() for key in sorted(keys))
        self._hosts.send(LEADER, agents.RanksDumped(name, why), data)

    def _is_put(self, name: str, size: Size, error: OSError | None) -> None:
        why = "" if error is None else str(error)
        self._say(agents.SnapshotPut(name, why, size.images, size.stored, size.disk))

    def _say(self, message: AgentMessage) -> None:
        self._hosts.send(LEADER, message)
