"""The warm spares of one node: how many there can be, and what they have loaded."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jitckpt.agent.processes.spare_template import Spare, Template
from jitckpt.worker import autoload
from jitckpt.worker.spare import can_become

# What a Python with torch takes, generously; as much again is left to the training.
SPARE_BYTES = 1 << 30


class Spares:
    """Spares by local rank. For one thread at a time: the supervisor's, the agent's once that has ended."""

    def __init__(self, wanted: int | None) -> None:
        """wanted: spares for each rank; None for one where memory allows."""
        self._wanted = wanted
        self._modules: dict[int, list[str]] = defaultdict(list)
        self._changes: dict[int, dict[str, str]] = defaultdict(dict)
        self._waiting: dict[int, list[Spare]] = defaultdict(list)
        self._template: Template | None = None

    def note_loaded(
        self, local_rank: int, modules: Iterable[str], environment: Iterable[Sequence[str]]
    ) -> None:
        """Take note of what a worker has loaded: the next spare in its place loads it, too."""
        self._modules[local_rank] += modules
        self._changes[local_rank].update((name, value) for name, value in environment)

    def fill(
        self,
        commands: Mapping[int, Sequence[str]],
        environments: Mapping[int, Mapping[str, str]],
        at_least: int = 0,
    ) -> int:
        """Start the spares that are missing for these local ranks; return how many are ready or will be.

        at_least: so many for each, however little memory there is.

        Raises OSError if there can't be any more processes.
        """
        wanted = max(self.wanted(len(commands)), at_least)
        changes = in_all(list(self._changes.values()))
        for local_rank, command in commands.items():
            while can_become(command) and len(self._waiting[local_rank]) < wanted:
                template = self._living_template(command, list(environments.values()))
                # What is imported may ask which rank it is, and what it was told on the command line.
                environment = loading_environment(environments[local_rank], changes)
                spare = template.new_spare(self._modules[local_rank], command, environment)
                self._waiting[local_rank].append(spare)
            self._modules[local_rank] = []
        return sum(map(len, self._waiting.values()))

    def wanted(self, ranks: int) -> int:
        """Return how many spares each of so many ranks should have, by the memory that there is."""
        if self._wanted is not None:
            return self._wanted
        return 1 if available_memory() >= 2 * SPARE_BYTES * ranks else 0

    def _living_template(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Template:
        if self._template is None or not self._template.alive():
            self._end_template()
            environment = loading_environment(environments[0], in_all(list(self._changes.values())))
            self._template = Template(command, environment)
        return self._template

    def kill_template(self) -> None:
        """For rehearsed failures: what was forked from it lives on."""
        if self._template is not None:
            self._template.kill()

    def _end_template(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def take(self, local_rank: int) -> Spare | None:
        """Return a spare for this rank, the caller's from now on, or None."""
        return self._waiting[local_rank].pop(0) if self._waiting[local_rank] else None

    def close(self) -> None:
        """End all that nobody took."""
        self._end_template()
        for spares in self._waiting.values():
            while spares:
                spares.pop().close()


def in_all(changes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the variables that all ranks have set to the same value."""
    return dict(set.intersection(*(set(one.items()) for one in changes))) if changes else {}


def loading_environment(environment: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a spare: libraries read some when they are loaded, so those of the training.

    But those for the loader and for Python itself came too late for the training, and do so here. And what
    hooks a rank gets depends on the rank.
    """
    environment = {name: value for name, value in environment.items() if name not in autoload.VARIABLES}
    ours = {name: value for name, value in changes.items() if not name.startswith(("LD_", "PYTHON"))}
    return {**environment, **ours}


def available_memory() -> int:
    """Return the bytes of memory that this process and its children can still get without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    for folder in _control_groups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
        except OSError:  # the root has no limit, and other systems no such files
            continue
        if limit != "max":
            available = min(available, int(limit) - used)
    return available


def _control_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    own = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "0::/"
    )
    path = root / own[4:].strip()
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]
