"""`jitckpt suspend` and `resume`: a job whose script knows nothing of it becomes files, and goes on."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import JITCKPT, JITCKPT_RUN, Launcher, Result
from programs_of_tests import text_of
from taken_number import TAKE

from jitckpt.events import Event, read_events
from jitckpt.rehearsal.runs import lasting_shared_memory
from jitckpt.system import network_lock
from jitckpt.system.job_socket import FILE_NAME
from jitckpt.wire import environment

# Plain DDP with a process that loads the data, pinned memory, and a thread that counts in the job's store. It
# makes as many steps as the file `upto` says, and waits there for more.
SCRIPT = text_of("suspend")
STEPS = 36
TWO_HOSTS = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:1"]
EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = [str(EXAMPLES / "plain_ddp.py"), "--steps", "12", "--width", "16", "--layers", "1"]


@pytest.fixture(scope="module")
def program() -> str:
    return str(criu_of_this_machine().program)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the training ends with that nobody suspends."""
    job = Job(Launcher(tmp_path_factory.mktemp("undisturbed")), suspendable=False)
    job.go_to(STEPS)
    assert job.finish().status == 0
    return job.finals


@pytest.fixture
def memory() -> Iterator[Path]:
    """Give a folder in memory: a busy disk would take minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        used = os.open(folder, os.O_RDONLY)  # so that other tests see that it is no leftover
        yield Path(folder)
        os.close(used)


class Job:
    """Two ranks that go as far as they are let."""

    def __init__(
        self,
        launcher: Launcher,
        *words: str,
        suspendable: bool = True,
        program: str = "",
        script: str = SCRIPT,
    ) -> None:
        self.launcher, self.folder = launcher, launcher.directory / "checkpoints"
        self._path = launcher.script(script)
        self.go_to(0)
        command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
        command += ["--max-restarts", "0", "--checkpoint-dir", str(self.folder)]
        command += ["--suspendable"] if suspendable else []
        variables = ["SOFTGPU_DEVICES=2", *([f"{environment.CRIU.name}={program}"] if program else [])]
        self.process = launcher.start("env", *variables, *command, *words, self._path)
        self.result = Result(-1, "", "")

    def go_to(self, step: int) -> None:
        new = self.launcher.directory / "upto.new"
        new.write_text(str(step))
        new.replace(self.launcher.directory / "upto")

    def wait_for(self, step: int) -> None:
        seen = [self.launcher.directory / f"step-{rank}" for rank in (0, 1)]

        def is_there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return all(one.exists() and int(one.read_text() or 0) >= step for one in seen)

        self.launcher.wait_until(is_there)

    def suspend(self, to: Path | None = None, *, after: int) -> Result:
        """Ask for it once all ranks have made so many steps, and let them make those that it takes."""
        self.go_to(after)
        self.wait_for(after)
        words = [] if to is None else ["--to", str(to)]
        asked = self.launcher.start(*JITCKPT, "suspend", str(self.folder), *words)
        assert asked.stdout is not None
        first = asked.stdout.readline()  # which step it is
        self.go_to(after + 6)
        result = self.launcher.finish(asked)
        return Result(result.status, first + result.out, result.err)

    def resume(self) -> Result:
        return self.launcher.run(*JITCKPT, "resume", str(self.folder))

    def finish(self) -> Result:
        self.result = self.launcher.finish(self.process)
        assert self.launcher.survivors() == [], self.result.err
        return self.result

    @property
    def finals(self) -> list[str]:
        return finals(self.result.out)

    def events(self, name: str) -> list[Event]:
        return [event for event in read_events(self.folder)[0] if event["event"] == name]

    def living(self) -> list[str]:
        """Return what lives of the job's processes beside the launcher, by their commands."""
        others = set(self.launcher.survivors()) - {self.process.pid}
        found = [command_of(pid) for pid in others]
        return [command for command in found if self._path in command or "jitckpt-proxy-server" in command]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_job_that_is_suspended_three_times_ends_as_if_it_never_was(
    launcher: Launcher, program: str, undisturbed: list[str], memory: Path
) -> None:
    """In the middle of an epoch; meanwhile another job has its devices. A failure comes between two times."""
    before, locks = set(os.listdir("/dev/shm")), network_lock.tables()
    job = Job(launcher, "--fault", "rank=1 step=14 phase=backward kind=device-lost", program=program)
    for cycle, after in enumerate((7, 15, 23)):
        suspended = job.suspend(memory, after=after)
        assert suspended.status == 0, suspended
        assert job.living() == []
        assert [path.stat().st_mode & 0o777 for path in memory.iterdir()] == [0o700]
        again = launcher.run(*JITCKPT, "suspend", str(job.folder))
        assert (again.status, "It is already suspended." in again.out) == (1, True)
        if cycle == 0:
            command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", *PLAIN]
            launcher.succeed("env", "SOFTGPU_DEVICES=2", *command)
        resumed = job.resume()
        assert resumed.status == 0, resumed
        assert list(memory.iterdir()) == []
    job.go_to(STEPS)
    result = job.finish()
    assert result.status == 0, result.err
    assert job.finals == undisturbed
    assert all(line.endswith("True") for line in job.finals)  # the same processes
    assert len(job.events("suspended")) == len(job.events("resumed")) == 3
    away = sum(event["suspended"] - event["seconds"] for event in job.events("resumed"))
    stood = [float(text) for text in re.findall(r"^stood still (.*)$", result.out, re.MULTILINE)]
    assert len(stood) == 2
    assert min(stood) > away  # no time-out of the script's has run meanwhile
    assert len(job.events("device_alarm")) == 1
    assert not (job.folder / FILE_NAME).exists()
    launcher.wait_until(lambda: network_lock.tables() <= locks)
    assert lasting_shared_memory(before | {memory.name}) == []


def test_what_can_not_be_dumped_or_has_no_room_runs_on(
    launcher: Launcher, program: str, undisturbed: list[str], memory: Path
) -> None:
    """The second rank's dump fails: the first is made again. And a small disk: that is seen before."""
    small = memory / "small"
    small.mkdir()
    seen = launcher.directory / "dumped"
    second = f"{{ touch {seen}-2; exit 3; }}"  # whichever it is: they are dumped side by side
    text = f"[ $1 != dump ] || [ -e {seen}-2 ] || mkdir {seen} 2> /dev/null || {second}"
    broken = Path(launcher.script(f'#!/bin/sh\n{text}\nexec {program} "$@"\n', "criu"))
    broken.chmod(0o700)
    job = Job(launcher, program=str(broken))
    # The trial before the job begins has been the first dump.
    launcher.wait_until(seen.exists)
    seen.rmdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(small)], check=True)
    try:
        refused = job.suspend(small, after=7)
        assert refused.status == 1
        assert re.search(r"Its images need .* MB|Its images need .* GB", refused.out), refused
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert not seen.exists()
    failed = job.suspend(memory, after=13)
    assert failed.status == 1, failed
    assert "it has ended with status 3" in failed.out
    assert list(memory.glob("jitckpt-*")) == []
    assert job.suspend(memory, after=19).status == 0
    assert job.resume().status == 0
    job.go_to(STEPS)
    assert job.finish().status == 0, job.result.err
    assert job.finals == undisturbed
    assert len(job.events("suspension_failed")) == 1


def test_a_damaged_image_is_never_gone_on_from(launcher: Launcher, program: str, memory: Path) -> None:
    """Nor is it tried while another process has one of the numbers; then the job stays suspended."""
    job = Job(launcher, program=program)
    early = launcher.run(*JITCKPT, "suspend", str(launcher.directory / "nowhere"))
    assert (early.status, "There is no directory" in early.err) == (2, True)
    job.go_to(7)
    job.wait_for(7)
    running = job.resume()
    assert (running.status, "It is not suspended." in running.out) == (1, True)
    assert job.suspend(memory, after=7).status == 0
    launcher.wait_until(lambda: job.events("suspended") != [])  # it is written on a thread of its own
    number = job.events("suspended")[0]["pids"][1][0]
    take = [sys.executable, "-c", TAKE, str(number)]
    with subprocess.Popen(take, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{number}\n"
        taken = job.resume()
        other.communicate()
    assert taken.status == 1
    assert f"It stays suspended: there is a process {number} (python" in taken.out
    (pages,) = memory.glob("*/rank-1/pages-1.img")
    with pages.open("r+b") as file:
        file.seek(12345)
        byte = file.read(1)[0]
        file.seek(12345)
        file.write(bytes([byte ^ 1]))
    resumed = job.resume()
    assert resumed.status == 1
    assert "pages-1.img is not what was written" in resumed.out
    result = job.finish()
    assert result.status == 1
    assert job.finals == []
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_launcher_that_ends_while_its_job_is_suspended(
    launcher: Launcher, program: str, memory: Path, end: signal.Signals
) -> None:
    locks = network_lock.tables()
    job = Job(launcher, program=program)
    assert job.suspend(memory, after=7).status == 0
    job.process.send_signal(end)
    result = launcher.finish(job.process)
    assert result.status == {signal.SIGTERM: 1, signal.SIGKILL: -signal.SIGKILL}[end], result.err
    launcher.wait_until(lambda: not launcher.survivors())
    launcher.wait_until(lambda: not list(memory.iterdir()))
    launcher.wait_until(lambda: network_lock.tables() <= locks)
    gone = job.resume()
    assert gone.status == 2
    if end == signal.SIGTERM:
        assert "told to end while it was suspended" in result.err
    else:
        assert f"The job's launcher, process {job.process.pid}, can't be reached" in gone.err


def test_a_job_that_can_not_be_suspended_says_so_and_runs_on(
    launcher: Launcher, program: str, memory: Path, undisturbed: list[str]
) -> None:
    ring = 'ring = dist.TCPStore("127.0.0.1", 0, is_master=True)'
    with_ring = SCRIPT.replace("\nmain()\n", f"\n{ring}\nmain()\n")
    job = Job(launcher, program=program, script=with_ring)
    refused = job.suspend(memory, after=7)
    assert refused.status == 1
    assert "has an io_uring" in refused.out
    job.go_to(STEPS)
    assert job.finish().status == 0, job.result.err
    assert job.finals == undisturbed
    over = launcher.run(*JITCKPT, "suspend", str(job.folder))
    assert (over.status, "it has ended" in over.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mode", "user"], "--suspendable: only --mode transparent"),
        (["--mode", "transparent", *TWO_HOSTS, "--broken-device", "move"], "on several hosts not yet with"),
        (["--mode", "transparent", "--nnodes", "1"], "--suspendable needs --checkpoint-dir"),
    ],
)
def test_what_a_job_needs_to_be_suspendable_is_said(launcher: Launcher, words: list[str], said: str) -> None:
    result = launcher.run(*JITCKPT, "run", "--device", "softgpu", "--suspendable", *words, *PLAIN)
    assert result.status == 2
    assert said in result.err
