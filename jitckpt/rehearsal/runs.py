"""Runs a job under `jitckpt run` in a folder of its own, with or without failures; says what came of it."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitckpt.events import FILE_NAME, Event, read_events
from jitckpt.reports.timeline import Recovery, recoveries
from jitckpt.saves import final_state
from jitckpt.saves.final_state import FinalState
from jitckpt.wire.environment import AGENT_FD, REHEARSAL, REHEARSAL_DIR

# Not the `jitckpt` on PATH, which may be another one; -P: a source tree in the current folder is no package.
JITCKPT = [sys.executable, "-P", "-c", "import sys; from jitckpt.cli import main; sys.exit(main())"]
STEP_LINE = re.compile(r"step (\d+) of (\d+)")
# In the environment of every process of a run, so that those that it leaves behind are found.
MARK = REHEARSAL.name
SERVER = "jitckpt-proxy-s"  # the name of a device proxy's server, as the kernel keeps it
LAUNCHER = -1  # in the place of a rank: `jitckpt run` itself
NOBODY = -2  # in the place of a rank: what happens befalls no process
CHECKPOINTS, OUTPUT, TEMPORARY = "ckpt", "output.txt", "tmp"
LOOK_SECONDS = 0.01
STAY_SECONDS = 5.0
SHARED_LOOK_SECONDS = 0.5
_running: set[str] = set()  # marks of the jobs that this process runs now


@dataclass(frozen=True)
class Strike:
    """A signal from outside, `delay` seconds after the first event of this name in that start.

    rank: or LAUNCHER. event: a name in events.jsonl, such as first_step, save_begun or restart. restart: 0 is
    the first start.
    """

    rank: int
    event: str
    delay: float
    restart: int = 0
    signal: int = signal.SIGKILL

    def __str__(self) -> str:
        when = f"{1000 * self.delay:.0f} ms after {self.event}"
        restarted = f" of restart {self.restart}" if self.restart else ""
        whom = "launcher" if self.rank == LAUNCHER else f"rank={self.rank}"
        return f"{whom} {self._what()} {when}{restarted}"

    @property
    def is_a_failure(self) -> bool:
        """Whether it ends what it hits, so that the job has to restart; not of other kinds of strikes."""
        return type(self) is Strike

    def happen(self, folder: Path, mark: str) -> bool:
        """Strike the job in this folder; return whether somebody was there to be hit."""
        return signal_rank(folder, self, mark)

    def _what(self) -> str:
        return signal.Signals(self.signal).name


@dataclass(frozen=True)
class ServerStrike(Strike):
    """A signal to the server that has the rank's device, in transparent mode."""

    def happen(self, folder: Path, mark: str) -> bool:
        """Hit the oldest one: another one is its spare."""
        named = [pid for pid, name in processes_with(mark) if name.startswith(SERVER)]
        servers = [pid for pid in named if is_worker(pid, self.rank)]  # it has its worker's environment
        if not servers:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(min(servers, key=_start_time), self.signal)
            return True
        return False

    def _what(self) -> str:
        return f"server {super()._what()}"


@dataclass(frozen=True)
class FullDisk(Strike):
    """From then on the rank's process can write no more than `size` bytes into a file, as on a full disk."""

    size: int = 0

    def happen(self, folder: Path, mark: str) -> bool:
        """Hit the rank's process of that start, and no later one."""
        registered = [e["pid"] for e in events_in(folder) if _is_registration(e, self)]
        if not registered or not has_mark(registered[-1], mark):
            return False
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(registered[-1], resource.RLIMIT_FSIZE, (self.size, self.size))
            return True
        return False

    def _what(self) -> str:
        return f"disk full after {self.size} bytes"


@dataclass(frozen=True)
class Unwritable(Strike):
    """Nothing can be made in the checkpoint directory, until the job restarts; without effect on root."""

    def __str__(self) -> str:
        return super().__str__().replace(f"rank={NOBODY} ", "", 1)

    def happen(self, folder: Path, mark: str) -> bool:
        """Change the directory's mode, and change it back once the ranks are started again."""
        directory = folder / CHECKPOINTS
        directory.chmod(0o555)
        try:
            while processes_with(mark) and not any(e["event"] == "restart" for e in events_in(folder)):
                time.sleep(LOOK_SECONDS)
        finally:
            directory.chmod(0o755)
        return True

    def _what(self) -> str:
        return "checkpoint directory unwritable"


def _is_registration(event: Event, what: Strike) -> bool:
    found = event["event"], event["restart"], event.get("rank")
    return found == ("registered", what.restart, what.rank)


@dataclass(frozen=True)
class Run:
    """One run of a job, from its first process to its last.

    steps: (seconds since the start, step) for each "step N of M" that was printed, in order of time.
    final: what each rank ended with. struck: the strikes that hit a rank. left_behind: what should not be
    there any more, a text each. halves: signs that two halves of the job went on at once (halves.py).
    """

    status: int
    seconds: float
    steps: tuple[tuple[float, int], ...]
    final: dict[int, FinalState]
    events: tuple[Event, ...]
    struck: tuple[Strike, ...]
    left_behind: tuple[str, ...]
    halves: tuple[str, ...] = ()

    @property
    def restarts(self) -> int:
        return max((event["restart"] for event in self.events), default=0)

    @property
    def recoveries(self) -> list[Recovery]:
        return recoveries(self.events)

    @property
    def step_seconds(self) -> float:
        """The mean time of a step, between the first and the end."""
        first = [event for event in self.events if event["event"] == "first_step"]
        last = [event for event in self.events if event["event"] == "finished"]
        if not first or not last or last[-1]["step"] <= first[0]["step"]:
            return 0.0
        return float((last[-1]["clock"] - first[0]["clock"]) / (last[-1]["step"] - first[0]["step"]))


def run_job(
    command: Sequence[str],
    folder: Path,
    *,
    ranks: int = 2,
    device: str = "softgpu",
    faults: Sequence[str] = (),
    strikes: Sequence[Strike] = (),
    launcher: Sequence[str] = (),
    hang_timeout: float = 60,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    end_when: Callable[[Sequence[Event]], bool] | None = None,
    time_limit: float = 300,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Run a script with its arguments under `jitckpt run`, its saves in `folder`, which must not exist yet.

    faults, device, hang_timeout: as for `jitckpt run`; options of it may precede the script.
    launcher: the words of what starts `jitckpt run`, such as setpriv with its options.
    on_step(step, steps): called when "step N of M" is printed. cwd: where the job runs, else in `folder`.
    end_when: asked of the events again and again; once it is true the job is sent SIGTERM, to save and end.
    variables: of the environment, beside those of this process. Raises TimeoutError after time_limit seconds.
    """
    temporary = folder / TEMPORARY
    temporary.mkdir(parents=True)
    options = ["--standalone", "--nproc-per-node", str(ranks), "--device", device]
    options += ["--hang-timeout", str(hang_timeout)]
    options += [word for fault in faults for word in ("--fault", fault)]
    mark = f"{MARK}={uuid.uuid4()}"
    note_running(mark)
    shared_memory = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    whole_command = [*launcher, *JITCKPT, "run", *options, *command]
    process = _start(whole_command, mark, folder=folder, cwd=cwd or folder, variables=variables or {})
    announced: list[tuple[float, int]] = []
    try:
        with (
            shared_memory_used_by(mark) as used,
            _befallen(
                process, folder, mark, strikes=strikes, end_when=end_when, time_limit=time_limit
            ) as struck,
        ):
            for line in record(process, folder / OUTPUT):
                if match := STEP_LINE.search(line):
                    announced.append((time.monotonic() - began, int(match[1])))
                    on_step(int(match[1]), int(match[2]))
            status = process.wait()
    finally:
        if process.poll() is None:  # we have been interrupted
            kill_all(mark)
            process.wait()
        note_ended(mark)
    seconds = time.monotonic() - began
    if seconds > time_limit:
        raise TimeoutError(f"The job did not end in {time_limit:.0f} s, see {folder / OUTPUT}.")
    left_behind = _left_behind(mark, shared_memory, used, temporary)
    return Run(
        status,
        seconds,
        tuple(announced),
        final_state.read(folder / final_state.FOLDER),
        tuple(events_in(folder)),
        tuple(struck),
        left_behind,
    )


def _start(
    command: Sequence[str], mark: str, *, folder: Path, cwd: Path, variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a job whose processes are found by their environment, and write what they leave to `folder`."""
    own_variables = {
        MARK: mark.removeprefix(f"{MARK}="),
        **REHEARSAL_DIR.to(folder),
        "TMPDIR": str(folder / TEMPORARY),
        # torch itself makes this folder in TMPDIR and leaves it there.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch-cache"),
    }
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **variables, **own_variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@contextlib.contextmanager
def _befallen(
    process: subprocess.Popen[str],
    folder: Path,
    mark: str,
    *,
    strikes: Sequence[Strike],
    end_when: Callable[[Sequence[Event]], bool] | None,
    time_limit: float,
) -> Iterator[list[Strike]]:
    """Have the strikes, and the ends that are wanted, happen to a job; give a list of those that hit."""
    deadline = threading.Timer(time_limit, kill_all, (mark,))
    deadline.start()
    over = threading.Event()
    struck: list[Strike] = []
    strikers = [threading.Thread(target=strike, args=(one, folder, mark, over, struck)) for one in strikes]
    if end_when is not None:
        strikers.append(threading.Thread(target=end, args=(process, end_when, folder, over)))
    for striker in strikers:
        striker.start()
    try:
        yield struck
    finally:
        over.set()
        deadline.cancel()
        for thread in (deadline, *strikers):
            thread.join()


def _left_behind(mark: str, before: set[str], used: set[str], temporary: Path) -> tuple[str, ...]:
    """Return what a run should not have left, a text each."""
    return (
        *(f"process {pid}: {name}" for pid, name in processes_with(mark)),
        *(f"/dev/shm/{name}" for name in lasting_shared_memory(before, used)),
        *(str(path) for path in sorted(temporary.rglob("*"))),
    )


def events_in(folder: Path) -> list[Event]:
    """Return the events of the job that runs, or ran, in this folder."""
    checkpoints = folder / CHECKPOINTS
    return read_events(checkpoints)[0] if (checkpoints / FILE_NAME).exists() else []


def record(process: subprocess.Popen[str], file: Path) -> Iterator[str]:
    """Yield what the process prints, line by line, and write it to the file, too."""
    assert process.stdout is not None
    with file.open("w") as output:
        for line in process.stdout:
            output.write(line)
            output.flush()
            yield line


def processes_with(mark: str) -> list[tuple[int, str]]:
    """Return process id and name of all processes that have this variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if entry.name.isdigit() and has_mark(int(entry.name), mark):
                found.append((int(entry.name), (entry / "comm").read_text().strip()))
    return found


def has_mark(pid: int, mark: str) -> bool:
    """Return whether there is such a process, with this variable in its environment."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # it has just ended, or it is another user's


def lasting_shared_memory(before: set[str], used: set[str] | None = None) -> list[str]:
    """Return the new files in /dev/shm that nobody uses and that stay; used: of those alone.

    Other programs make some there, too; between the end of such a program and the removal of its files by
    Python's resource tracker nobody uses them.
    """
    until = time.monotonic() + STAY_SECONDS
    while True:
        found = [name for name in unused_shared_memory(before) if used is None or name in used]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def unused_shared_memory(before: set[str]) -> list[str]:
    """Return the files in /dev/shm that are new since `before` and that no living process uses."""
    new = set(os.listdir("/dev/shm")) - before
    if new:
        processes = [Path("/proc", name) for name in os.listdir("/proc") if name.isdigit()]
        new -= {name for process in processes for name in _used_shared_memory(process)}
    return sorted(new & set(os.listdir("/dev/shm")))


@contextlib.contextmanager
def shared_memory_used_by(mark: str) -> Iterator[set[str]]:
    """Give what the processes with this variable use in /dev/shm meanwhile, as far as a look has met it."""
    used: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(SHARED_LOOK_SECONDS):
            for pid, _ in processes_with(mark):
                used.update(_used_shared_memory(Path("/proc", str(pid))))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield used
    finally:
        over.set()
        looker.join()


def _used_shared_memory(process: Path) -> set[str]:
    """Return the names in /dev/shm that it uses; of a folder there it may use a file."""
    paths = (*_links(process / "fd"), *_mapped(process))
    return {Path(path).parts[3] for path in paths if path.startswith("/dev/shm/")}


def _links(folder: Path) -> Iterator[str]:
    """Where the links in a folder of /proc point; nowhere once the process is gone."""
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)


def _mapped(process: Path) -> Iterator[str]:
    """What it has mapped of /dev/shm; map_files would tell it, too, but not all whom maps tells it."""
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            if (begin := line.find("/dev/shm/")) >= 0:
                yield line[begin:].rstrip("\n")


def note_running(mark: str) -> None:
    """Have `kill_running` end the job of this mark, too."""
    _running.add(mark)


def note_ended(mark: str) -> None:
    """The job of this mark has ended."""
    _running.discard(mark)


def kill_running() -> None:
    """Kill all jobs that other threads run; their `run_job` returns then."""
    for mark in tuple(_running):
        kill_all(mark)


def kill_all(mark: str) -> None:
    for pid, _ in processes_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def strike(what: Strike, folder: Path, mark: str, over: threading.Event, struck: list[Strike]) -> None:
    """Wait for the moment and send the signal; give up once the job is over."""
    while not over.wait(LOOK_SECONDS):
        if any((e["event"], e["restart"]) == (what.event, what.restart) for e in events_in(folder)):
            over.wait(what.delay)
            while not over.wait(LOOK_SECONDS):  # a worker that is to be hit at its start may not be there yet
                if what.happen(folder, mark):
                    struck.append(what)
                    return


def end(
    process: "subprocess.Popen[str]",
    end_when: Callable[[Sequence[Event]], bool],
    folder: Path,
    over: threading.Event,
) -> None:
    """Send SIGTERM to the job's launcher once it is time."""
    while not over.wait(LOOK_SECONDS):
        if end_when(events_in(folder)):
            process.terminate()
            return


def signal_rank(folder: Path, what: Strike, mark: str) -> bool:
    """Send the signal to the rank's living worker; return whether there is one.

    That is who registered last, else the oldest of the processes that have the rank's environment.
    """
    living = [pid for pid, _ in processes_with(mark)]
    if what.rank == LAUNCHER:
        os.kill(min(living, key=_start_time), what.signal)
        return True
    events = events_in(folder)
    registered = [e["pid"] for e in events if e["event"] == "registered" and e["rank"] == what.rank]
    starting = [pid for pid in sorted(living, key=_start_time) if is_worker(pid, what.rank)]
    for pid in [*(pid for pid in registered[-1:] if pid in living), *starting]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what.signal)
            return True
    return False


def is_worker(pid: int, rank: int) -> bool:
    """Return whether this process has the environment of a worker of `rank`."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"RANK=%d" % rank in variables and any(
        v.startswith(f"{AGENT_FD.name}=".encode()) for v in variables
    )


def _start_time(pid: int) -> int:
    """The time at which a process began, in clock ticks since the machine did; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
