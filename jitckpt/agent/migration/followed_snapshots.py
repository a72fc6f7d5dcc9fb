"""A host's part in snapshots of a job, where another host leads them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from jitckpt.agent.migration.host_dumps import HostDumps
from jitckpt.agent.migration.host_part import DONE, FAILURES, HostPart, Place
from jitckpt.agent.migration.part_copier import PartCopier
from jitckpt.agent.migration.shelf import Size
from jitckpt.agent.proxies.control import LEADER
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.wire import agents
from jitckpt.wire.agents import AgentMessage


class FollowedSnapshots(HostPart):
    """On a host that is not the first: does what that one asks for."""

    def __init__(self, dumps: HostDumps, place: Place, hosts: Hosts, copier: PartCopier) -> None:
        super().__init__(dumps, place)
        self._hosts, self._copier = hosts, copier
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
            case agents.DumpRanks(name=name, step=step):
                self._dump(name, step)
            case agents.SnapshotTaken(name, made) if name == self._name:
                if made:
                    dumps.put({"name": name, "rest": {}, "store": {}}, partial(self._is_put, name))
                else:
                    dumps.drop()
            case agents.SnapshotWhole(name, made, ends) if name == self._name:
                self._is_whole(name, made=made, ends=ends)
            case agents.SuspensionSays(text, status):
                self._callers.tell(text, status)
                self.suspended |= status == DONE
            case agents.ForgetSnapshots():
                dumps.shelf.settle()
                dumps.shelf.forget()
                self._copier.forget()
            case message:
                self._hear_of_copies(message)

    def _hear_of_copies(self, message: AgentMessage) -> None:
        match message:
            case agents.CopySnapshot() as asked:
                self._copier.begin(asked, partial(self._is_copied, asked.name))
            case agents.SnapshotProtected(step, name, made):
                self._copier.end((step, name), made=made)

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

    def _is_whole(self, name: str, *, made: bool, ends: bool) -> None:
        shelf = self._dumps.shelf
        shelf.all_have() if made else shelf.not_all_have()
        if ends:
            self._await_end(self._step)
            self._say(agents.EndAwaited(name))
        elif made:
            self._copier.tidy()

    def _is_copied(self, name: str, why: str, size: int) -> None:
        self._say(agents.SnapshotCopied(name, why, size))

    def _say(self, message: AgentMessage) -> None:
        self._hosts.send(LEADER, message)
