"""The other hosts of a start, as the control thread of this one knows them: which are lost, and who leads."""

from jitckpt.hosts.connections import Hosts
from jitckpt.wire import agents, protocol
from jitckpt.wire.protocol import WorkerMessage


class OtherHosts:
    """Of a job on one host there are none, and nothing is sent."""

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self.lost: set[int] = set()
        self.losses: dict[int, str] = {}  # hosts that are lost, and why
        self.leaving: set[int] = set()  # hosts whose agents were asked to end

    @property
    def is_alone(self) -> bool:
        """Whether the job has this host alone."""
        return self._hosts is None

    @property
    def connected(self) -> Hosts:
        """The connections, of a job on several hosts."""
        assert self._hosts is not None
        return self._hosts

    @property
    def gone(self) -> set[int]:
        """The hosts that will not start the ranks again: they are lost, or were asked to end.

        One that has come for another's ranks has no part in that anyway.
        """
        return {host for host in self.lost | self.leaving if self.connected.all[host].ranks_of < 0}

    def leader(self) -> int:
        """Return the host that looks into hangs, logs and says what concerns all: the first that lives."""
        return min(set(range(len(self.connected.all))) - self.lost)

    def leads(self) -> bool:
        return self._hosts is None or self.leader() == self._hosts.index

    def this_agent(self) -> str:
        """Return what this host's agent is called where users read it."""
        return "the agent" if self._hosts is None else f"{self._hosts.name(self._hosts.index)}'s agent"

    def name(self, host: int) -> str:
        return "" if self._hosts is None else self._hosts.name(host)

    def tell(self, message: agents.AgentMessage) -> None:
        """Tell all of them."""
        if self._hosts is not None:
            self._hosts.broadcast(message)

    def tell_host_of(self, rank: int, message: agents.AgentMessage) -> None:
        self.connected.send(self.connected.host_of(rank), message)

    def pass_on(self, rank: int, message: WorkerMessage) -> None:
        """Let the others hear what a rank of this one says; what only one host acts on goes to that one."""
        if self._hosts is None or isinstance(message, protocol.Loaded):
            return
        said = agents.Said(rank, protocol.encode(message).decode())
        if not isinstance(message, protocol.Progress | protocol.Group):
            self._hosts.broadcast(said)
        elif not self.leads():
            self._hosts.send(self.leader(), said)
