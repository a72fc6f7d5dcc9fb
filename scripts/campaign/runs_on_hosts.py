"""Runs a job on several hosts, network namespaces of this machine; hosts die whole, and come again."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from campaign import halves
from campaign.etcd_members import EtcdMembers
from jitckpt.bindings.clock import LIBRARY, preloaded
from jitckpt.device import LIBRARY_DIR
from jitckpt.events import Event, read_events
from jitckpt.rehearsal import runs
from jitckpt.rehearsal.namespaces import APART, Namespaces, namespaces
from jitckpt.rehearsal.runs import (
    CHECKPOINTS,
    JITCKPT,
    LOOK_SECONDS,
    MARK,
    OUTPUT,
    STEP_LINE,
    Run,
    Strike,
    kill_all,
    lasting_shared_memory,
    processes_with,
    record,
)
from jitckpt.saves import final_state
from jitckpt.saves.final_state import FinalState
from jitckpt.wire.environment import REHEARSAL_DIR

HOSTS = 3
CLOCK_LIBRARY = LIBRARY_DIR / LIBRARY
ONE_EACH = (1,) * HOSTS  # ranks
STRIKE_SECONDS = 0.03  # between two looks at what the job tells
ENDS_SECONDS = 90.0  # until the ranks of a killed agent have saved and ended
# At the rendezvous' store: on host 0 until that one dies.
MEET = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400")
LATE_SECONDS = 30.0  # from a host's end to that of one that came when the job was over
NEVER_CAME_SECONDS = 120.0  # that a host waits for others which have ended


@dataclass(frozen=True)
class HostStrike(Strike):
    """All processes of a host are killed at once, and the same command is started there. rank: the host."""

    @property
    def is_a_failure(self) -> bool:
        """Whether all ranks of the host end, so that the job has to restart."""
        return type(self) is HostStrike

    def befall(self, job: "JobOnHosts") -> None:
        """Let it happen."""
        job.lose(self.rank)
        job.start(self.rank)

    def _what(self) -> str:
        return "dies"

    def __str__(self) -> str:
        return super().__str__().replace("rank=", "host ", 1)


class JobOnHosts:
    """An agent on each host, with its ranks or standing by; each may have a checkpoint directory of its own.

    troubles: why something could not be made to happen.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        hosts: Namespaces,
        own_directories: bool,
        *,
        ranks: Sequence[int] = ONE_EACH,
        etcd: EtcdMembers | None = None,
        devices: Sequence[int] = (),
    ) -> None:
        """ranks: how many each host has; one with none stands by.

        devices: how many each host has, if ranks may move to those that stand by.
        """
        self.ranks, self.devices = tuple(ranks), tuple(devices)
        self.folder, self.hosts, self.own_directories = folder, hosts, own_directories
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.steps: list[tuple[float, int]] = []
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.over = threading.Event()
        self.struck: list[Strike] = []
        self.troubles: list[Exception] = []
        self.etcd = etcd
        self._command = tuple(command)
        self._began = time.monotonic()
        self._readers: list[threading.Thread] = []
        self._late: list[subprocess.Popen[str]] = []  # they came when the job was over
        self._lost = 0  # directories
        self._lock = threading.Lock()

    @property
    def with_ranks(self) -> list[int]:
        """The hosts that don't stand by."""
        return [host for host, count in enumerate(self.ranks) if count]

    def start(self, host: int, faults: Sequence[str] = ()) -> None:
        """Start the command on a host, where nothing of it runs."""
        place = self._place(host)
        place.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary(host)
        temporary.mkdir(exist_ok=True)
        variables = {
            MARK: self.mark.removeprefix(f"{MARK}="),
            **REHEARSAL_DIR.to(place),
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torch-cache"),
            "OMP_NUM_THREADS": "1",  # as torchrun has it where a host has several ranks: sums depend on it
        }
        if self.etcd is not None:
            self.etcd.start(host)
            if CLOCK_LIBRARY.exists():  # so that a host's time of day can jump
                variables = preloaded(str(CLOCK_LIBRARY), os.environ | variables)
        meet = MEET if self.etcd is None else self.etcd.options
        on = self.hosts.on(host)
        if self.devices:
            variables["SOFTGPU_DEVICES"] = str(self.devices[host])
            on, meet = self._where_ranks_move(host)
        run = [*JITCKPT, "run", "--nnodes", str(len(self.with_ranks)), *meet]
        run += ["--nproc-per-node", str(self.ranks[host] or 1), "--device", "softgpu"]
        run += ["--checkpoint-dir", str(self._saves(host))]
        run += [word for fault in faults for word in ("--fault", fault)]
        agent = subprocess.Popen(
            [*on, *run, *self._command],
            cwd=place,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with self._lock:
            self.agents[host] = agent
            number = sum(1 for _ in self.folder.glob(f"host-{host}-*"))
            output = self.folder / f"host-{host}-{number}" / OUTPUT
            output.parent.mkdir()
            reader = threading.Thread(target=self._read, args=(agent, output))
            self._readers.append(reader)
        reader.start()

    def _where_ranks_move(self, host: int) -> tuple[list[str], list[str]]:
        """Return what comes before the command on a host, and its options, by which it finds the others."""
        on, options = self.hosts.in_network_of(host), [*MEET, "--secret-file", str(self._secret())]
        if self.ranks[host]:
            return on, [*options, "--node-rank", str(host)]
        return [*on, *APART], [*options, "--standby"]

    def _secret(self) -> Path:
        path = self.folder / "secret"
        if not path.exists():
            path.touch(0o600)
            path.write_text(token_hex(16))
        return path

    def start_standby(self, faults: Sequence[str] = ()) -> None:
        """Once the job has its hosts, start the others, which stand by. faults: of ranks that move there."""
        while not self.over.wait(STRIKE_SECONDS):
            if any(event["event"] == "job_started" for event in self.events()):
                for host in set(range(len(self.ranks))) - set(self.with_ranks):
                    self.start(host, faults)
                return

    def lose_agent(self, host: int, stays: Callable[[int], bool]) -> None:
        """Kill a host's agent alone; return when its ranks have ended. Raises TimeoutError.

        stays: whether a process of the host goes on without them.
        """
        self.agents[host].kill()
        self.agents[host].wait()
        end = time.monotonic() + ENDS_SECONDS
        while not all(map(stays, self.hosts.processes(host))):
            if time.monotonic() > end:
                raise TimeoutError(f"The ranks of host {host} have outlived its agent.")
            time.sleep(STRIKE_SECONDS)

    def lose(self, host: int) -> None:
        """Kill all processes of a host at once; what it alone has on its disk is lost with it."""
        while processes := self.hosts.processes(host):  # what was sent SIGKILL takes its time to go
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.agents[host].wait()
        self._lost += 1
        lost = self.folder / f"lost-{self._lost}"
        lost.mkdir()
        self._temporary(host).rename(lost / "tmp")
        if self.own_directories and self._saves(host).exists():
            self._saves(host).rename(lost / CHECKPOINTS)

    def events(self) -> list[Event]:
        """Return what all hosts have written, in order of time."""
        found = []
        for place in (self.folder, *self.folder.glob("disk-*"), *self.folder.glob("lost-*")):
            with contextlib.suppress(FileNotFoundError):  # nothing is there yet, or any more
                found += read_events(place / CHECKPOINTS)[0]
        return sorted(found, key=lambda event: event["clock"])

    def halves(self) -> list[str]:
        """Return the signs that two halves of the job went on at once."""
        places = (self.folder, *self.folder.glob("disk-*"), *self.folder.glob("lost-*"))
        # Where each host has a directory, nobody puts aside what others have of later steps.
        directories = halves.read(
            [place / CHECKPOINTS for place in places], set_aside=not self.own_directories
        )
        return halves.found(directories)

    def final(self) -> dict[int, FinalState]:
        """Return what the ranks of all hosts ended with."""
        found: dict[int, FinalState] = {}
        for host in range(len(self.ranks)):
            found |= final_state.read(self._place(host) / final_state.FOLDER)
        return found

    def wait(self, time_limit: float) -> int:
        """Wait until the agents of all hosts have ended; return the highest status. Raises TimeoutError.

        A host that comes when the job is over would wait for another one: it is asked to end.
        """
        deadline, waits_since = time.monotonic() + time_limit, None
        while any(agent.poll() is None for agent in self._all_agents()):
            if any(agent.poll() is not None for agent in self._all_agents()):
                waits_since = waits_since or time.monotonic()
            else:
                waits_since = None
            now = time.monotonic()
            if self.devices:  # a host that was left has ended, and the others have not
                waits_since = None
            running = [host for host, agent in sorted(self.agents.items()) if agent.poll() is None]
            if now > deadline or (waits_since is not None and now > waits_since + NEVER_CAME_SECONDS):
                raise TimeoutError(f"The agents of hosts {running} have not ended, see {self.folder}.")
            is_over = waits_since is not None and now > waits_since + LATE_SECONDS
            if is_over and not self._late and not any(map(self._said, running)):
                self._late = [self.agents[host] for host in running]
                for agent in self._late:
                    agent.terminate()
            time.sleep(LOOK_SECONDS)
        return max(abs(agent.wait()) for agent in self._all_agents() if agent not in self._late)

    def _said(self, host: int) -> bool:
        """Return whether the newest agent of a host, or a rank there, has said anything."""
        outputs = [path.stat() for path in self.folder.glob(f"host-{host}-*/{OUTPUT}")]
        return bool(outputs) and max(outputs, key=lambda found: found.st_mtime_ns).st_size > 0

    def _all_agents(self) -> "list[subprocess.Popen[str]]":
        """Return what is there now: strikes start others at any time."""
        with self._lock:
            return list(self.agents.values())

    def strike(self, what: Strike) -> None:
        """Wait for the moment and let it happen; not to a job of which a rank has finished."""
        while not self.over.wait(STRIKE_SECONDS):
            if any((e["event"], e["restart"]) == (what.event, what.restart) for e in self.events()):
                if self.over.wait(what.delay) or any(e["event"] == "finished" for e in self.events()):
                    return
                assert isinstance(what, HostStrike)
                self.struck.append(what)
                try:
                    what.befall(self)
                except Exception as error:  # it is raised where the run is
                    self.troubles.append(error)
                return

    def end(self) -> None:
        """Kill what still runs, and read all that was said."""
        self.over.set()
        kill_all(self.mark)
        for agent in self.agents.values():
            agent.wait()
        for reader in self._readers:
            reader.join()

    def left_behind(self) -> list[str]:
        """Return what should not be there any more."""
        found = [f"process {pid}: {name}" for pid, name in processes_with(self.mark)]
        for host in range(len(self.ranks)):
            found += [f"process {pid} on host {host}" for pid in self.hosts.processes(host)]
            found += [
                f"a socket that listens at {place} on host {host}" for place in self.hosts.listening(host)
            ]
        return found + [str(path) for path in sorted(self.folder.glob("tmp-*/**/*"))]

    def _temporary(self, host: int) -> Path:
        return self.folder / f"tmp-{host}"

    def _place(self, host: int) -> Path:
        return self.folder / f"disk-{host}" if self.own_directories else self.folder

    def _saves(self, host: int) -> Path:
        return self._place(host) / CHECKPOINTS

    def _read(self, agent: "subprocess.Popen[str]", output: Path) -> None:
        for line in record(agent, output):
            if match := STEP_LINE.search(line):
                self.steps.append((time.monotonic() - self._began, int(match[1])))


def run_on_hosts(
    command: Sequence[str],
    folder: Path,
    *,
    ranks: Sequence[int] = ONE_EACH,
    own_directories: bool = False,
    faults: Sequence[str] = (),
    strikes: Sequence[Strike] = (),
    time_limit: float = 300,
    coordination: bool = False,
    devices: Sequence[int] = (),
) -> Run:
    """Run a script with its arguments on several hosts, as runs.run_job does on one.

    ranks: how many each host has; one with none stands by. own_directories: each host has a checkpoint
    directory of its own, which is lost with it. strikes: at most one HostStrike after the other.
    coordination: they meet at etcd, with a member on each host. devices: as for JobOnHosts.
    Raises TimeoutError after time_limit seconds, HostsError where there can be no network namespaces.
    """
    folder.mkdir(parents=True)
    shared_memory = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    with namespaces(len(ranks)) as hosts, contextlib.ExitStack() as looks:
        etcd = EtcdMembers(hosts, folder) if coordination else None
        job = JobOnHosts(command, folder, hosts, own_directories, ranks=ranks, etcd=etcd, devices=devices)
        used = looks.enter_context(runs.shared_memory_used_by(job.mark))
        strikers = [threading.Thread(target=job.strike, args=(one,)) for one in strikes]
        strikers.append(threading.Thread(target=job.start_standby, args=[faults if devices else ()]))
        runs.note_running(job.mark)
        try:
            if etcd is not None:
                for host in range(len(ranks)):
                    etcd.start(host)
            status = _status_of(job, faults, strikers, time_limit)
            if etcd is not None:
                etcd.end()
            left_behind = job.left_behind()
        finally:
            job.over.set()
            for striker in strikers:
                if striker.is_alive():
                    striker.join()
            job.end()
            if etcd is not None:
                etcd.end()
            runs.note_ended(job.mark)
    left_behind += [f"/dev/shm/{name}" for name in lasting_shared_memory(shared_memory, used)]
    left_behind += [f"network namespace {name}" for name in hosts.left_behind()]
    return Run(
        status,
        time.monotonic() - began,
        tuple(job.steps),
        job.final(),
        tuple(job.events()),
        tuple(job.struck),
        tuple(left_behind),
        tuple(job.halves()),
    )


def _status_of(
    job: JobOnHosts, faults: Sequence[str], strikers: Sequence[threading.Thread], time_limit: float
) -> int:
    """Run a job; return its status. Raises what has kept something from happening to it."""
    for host in job.with_ranks:
        job.start(host, faults)
    for striker in strikers:
        striker.start()
    job.wait(time_limit)
    job.over.set()
    for striker in strikers:
        striker.join()
    for trouble in job.troubles:
        raise trouble
    return job.wait(time_limit)  # of a host that one of them has started, too
