"""One start of a job on one or several hosts, from its first process to its last."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from campaign_hostile import who
from campaign_hostile.place import Place
from campaign_hostile.trials import TRANSPARENT
from jitckpt.bindings import clock
from jitckpt.device import LIBRARY_DIR
from jitckpt.events import FILE_NAME, Event, read_events

JITCKPT = [sys.executable, "-P", "-c", "import sys; from jitckpt.cli import main; sys.exit(main())"]
SAVE_DEADLINE = 20  # seconds; ranks whose agent is killed get that long
LEAVE_SECONDS = 40.0  # from the end of the agents until nobody may be left
LOOK_SECONDS = 0.02
AGAIN_SECONDS = 1.0  # from the end of an agent on one of several hosts to the next one there
AGAIN_MOST = 4  # on each host
STORE = "10.79.0.1:29400"
CHECKPOINTS = "ckpt"
CLOCK_LIBRARY = LIBRARY_DIR / clock.LIBRARY


@dataclass(frozen=True)
class Outcome:
    """What came of a start.

    statuses: of the agents that were not replaced. final: the digest of what each rank ended with. step: the
    last one that was printed. restored: the one it went on from, 0 for none. late: it was ended after its
    time limit.
    """

    statuses: tuple[int, ...]
    seconds: float
    output: str
    final: Mapping[int, str]
    step: int
    restored: int
    left: tuple[str, ...]
    late: bool


@dataclass
class Start:
    """A start that runs. began: in seconds of the monotonic clock, as in the job's log."""

    places: Sequence[Place]
    training: Sequence[str]
    folder: Path
    mode: str
    ranks: int = 2  # on the only host; of several each has one
    clocks: bool = False  # can be made to jump
    began: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._started = [0] * len(self.places)
        for host in range(len(self.places)):
            self.agents.append(self._start(host))

    @property
    def directory(self) -> Path:
        return self.places[0].disk / CHECKPOINTS

    def events(self) -> list[Event]:
        path = self.places[0].seen / CHECKPOINTS
        if not (path / FILE_NAME).exists():
            return []
        return [event for event in read_events(path)[0] if event["clock"] >= self.began]

    def on(self, host: int) -> who.Job:
        """Return the processes on that host."""
        found = filter(None, map(who.read, self.places[host].processes()))
        ordered = sorted(found, key=lambda process: process.began)
        return who.Job(ordered, self.agents[host].pid, self.events())

    def finish(self, time_limit: float) -> Outcome:
        """Wait until the job has ended; say what came of it and end what is left."""
        deadline = self.began + time_limit
        while any(agent.poll() is None for agent in self.agents) and time.monotonic() < deadline:
            if len(self.agents) > 1:
                self._start_again()
            time.sleep(LOOK_SECONDS)
        late = any(agent.poll() is None for agent in self.agents)
        self.over.set()
        seconds = time.monotonic() - self.began
        if late:
            self._tell_where_they_are()
        return Outcome(
            tuple(agent.poll() if agent.poll() is not None else -99 for agent in self.agents),  # type: ignore[misc]
            seconds,
            self.output(),
            self._final(),
            max((int(line.split()[1].rstrip(":")) for line in self._lines() if _is_step(line)), default=0),
            next((event["step"] for event in self.events() if event["event"] == "restored"), 0),
            (),
            late,
        )

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("output-*")))

    def left(self) -> list[str]:
        """Wait until all processes have ended; return what should not be there any more, and end it."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while any(place.processes() for place in self.places) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        found = []
        for place in self.places:
            for process in filter(None, map(who.read, place.processes())):
                found.append(f"process {process.pid}, {process.name}: {process.command[:200]}")
            found += [f"socket that listens at {address}:{port}" for address, port in place.listening()]
            while place.processes():
                place.kill_all()
            found += place.left()
        for agent in self.agents:
            agent.wait()
        return found

    def end(self, host: int) -> None:
        """Kill all that runs on a host at once."""
        while self.places[host].processes():
            self.places[host].kill_all()
        self.agents[host].wait()

    def _start_again(self) -> None:
        """On several hosts, do what a scheduler does: start the command where an agent has failed."""
        for host, agent in enumerate(self.agents):
            failed = agent.poll() not in (None, 0)
            others_run = any(other.poll() is None for other in self.agents)
            if failed and others_run and self._started[host] < AGAIN_MOST:
                time.sleep(AGAIN_SECONDS)
                self.end(host)
                self.agents[host] = self._start(host)

    def _start(self, host: int) -> "subprocess.Popen[bytes]":
        place = self.places[host]
        self._started[host] += 1
        variables = {
            "TMPDIR": str(place.temporary),
            "HOME": str(place.home),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torch-cache"),
            "OMP_NUM_THREADS": "1",
        }
        options = ["--device", "softgpu", "--save-deadline", str(SAVE_DEADLINE), "--warm-start"]
        options += ["--hang-timeout", "8", "--stall-timeout", "15", "--checkpoint-dir", str(self.directory)]
        if len(self.places) > 1:
            options += ["--nnodes", str(len(self.places)), "--nproc-per-node", "1", "--host-timeout", "4"]
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", STORE]
            options += ["--rdzv-conf", "keep_alive_interval=2", "--warm-spares", "0"]
        else:
            options += ["--standalone", "--nproc-per-node", str(self.ranks)]
        if self.mode == TRANSPARENT:
            options += ["--mode", "transparent"]
        if self.clocks:
            variables |= {"LD_PRELOAD": str(CLOCK_LIBRARY)}
        command = place.command([*JITCKPT, "run", *options, *self.training], self.folder)
        with (self.folder / f"output-{host}-{self._started[host]}").open("wb") as output:
            return subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _lines(self) -> list[str]:
        return self.output().splitlines()

    def _final(self) -> dict[int, str]:
        printed = [line.split(": final state ") for line in self._lines() if ": final state " in line]
        return {int(rank.removeprefix("rank ")): digest for rank, digest in printed}

    def _tell_where_they_are(self) -> None:
        """Have every process of a job that does not end tell what it does, as far as it can."""
        with (self.folder / "output-late").open("w") as file:
            for place in self.places:
                for process in filter(None, map(who.read, place.processes())):
                    file.write(
                        f"\nprocess {process.pid}, child of {process.parent}: {process.command[:200]}\n"
                    )
                    with suppress(OSError):
                        for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
                            name = (task / "comm").read_text().strip()
                            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                            where = (task / "wchan").read_text()
                            file.write(f"  {task.name} {name} {state} {where}\n")


def _is_step(line: str) -> bool:
    """Return whether a training has printed that a step is done: "step 3 of 60", "step 3: loss 0.7"."""
    words = line.split()
    return len(words) > 2 and words[0] == "step" and words[1].rstrip(":").isdigit()
