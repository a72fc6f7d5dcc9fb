"""Who is who among the processes of a job, by what they are, for attacks that are meant for one kind."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jitckpt.events import Event


@dataclass(frozen=True)
class Process:
    """A living process. began: in clock ticks; born_as: its environment when its program was started."""

    pid: int
    parent: int
    name: str
    command: str
    began: int
    born_as: frozenset[str]


def read(pid: int) -> Process | None:
    """Return the process, None if it has ended."""
    folder = Path(f"/proc/{pid}")
    with suppress(OSError):
        name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        if fields[0] not in "ZX":
            return Process(pid, int(fields[1]), name, command, int(fields[19]), frozenset(environment))
    return None


@dataclass(frozen=True)
class Job:
    """The processes of a job on one host, oldest first, its agent, and what its log says."""

    processes: Sequence[Process]
    agent: int
    events: Sequence[Event]

    def agents(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid == self.agent]

    def guardians(self) -> list[int]:
        return [
            process.pid for process in self.processes if "jitckpt.agent.processes.guardian" in process.command
        ]

    def templates(self) -> list[int]:
        """Return the process that spares are forked from: the first that has loaded what they need."""
        return self._of_spares()[:1]

    def spares(self) -> list[int]:
        """Return those that wait; one that is a worker by now has registered, or will in a moment.

        A worker's own forks, which load its data, have the same command.
        """
        registered = self._registered()
        parents = {process.pid: process.parent for process in self.processes}
        return [
            pid for pid in self._of_spares()[1:] if pid not in registered and parents[pid] not in registered
        ]

    def workers(self) -> list[int]:
        started = [
            process.pid
            for process in self.processes
            if process.parent == self.agent
            and any(variable.startswith("RANK=") for variable in process.born_as)
            and process.pid not in self._of_spares()
            and not process.name.startswith("jitckpt-proxy-s")
        ]
        living = {process.pid for process in self.processes}
        return sorted({*started, *(self._registered() & living)})

    def loaders(self) -> list[int]:
        """Return the workers of DataLoaders, which are forks of a rank."""
        commands = {process.pid: process.command for process in self.processes}
        ranks = self.workers()
        return [
            process.pid
            for process in self.processes
            if process.parent in ranks and process.command == commands[process.parent]
        ]

    def servers(self) -> list[int]:
        return [process.pid for process in self.processes if process.name.startswith("jitckpt-proxy-s")]

    def everybody(self) -> list[int]:
        return [process.pid for process in self.processes]

    def _of_spares(self) -> list[int]:
        return [process.pid for process in self.processes if "spare import main" in process.command]

    def _registered(self) -> set[int]:
        return {event["pid"] for event in self.events if event["event"] == "registered"}


KINDS: dict[str, Callable[[Job], list[int]]] = {
    "agent": Job.agents,
    "guardian": Job.guardians,
    "template": Job.templates,
    "spare": Job.spares,
    "rank": Job.workers,
    "loader": Job.loaders,
    "server": Job.servers,
    "all": Job.everybody,
}
