"""A job on two hosts is suspended as a whole, and resumed on the same hosts or on others."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from launcher import JITCKPT, Launcher, Result
from namespaces import Namespaces, namespaces
from snapshot_job import in_memory, undisturbed_training
from test_snapshots_on_hosts import HOSTS, HostsJob
from test_standby import ELSEWHERE

from jitckpt.agent.migration.suspended_job import FILE_NAME
from jitckpt.system import network_lock
from jitckpt.wire import environment
from jitckpt.wire.exit_statuses import SAVED

MEET = ["--nnodes", "2", "--master-addr", "10.79.0.1"]
NEWCOMERS = (2, 3)  # hosts that have no part in the job at first


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return undisturbed_training(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def memory(launcher: Launcher) -> Iterator[Path]:
    """Give where the hosts' directories are."""
    with in_memory(launcher.directory / "disks") as folder:
        yield folder


class SuspendedJob(HostsJob):
    """Two hosts of a rank each."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Namespaces,
        memory: Path,
        *words: str,
        held: Sequence[str] = ("--suspendable",),
        shared: bool = False,
    ) -> None:
        if shared:
            (memory / "0").mkdir()
            (memory / "1").symlink_to("0")
        super().__init__(launcher, hosts, memory, *words, meet=MEET, held=held)

    def ask(self, host: int, *words: str) -> "subprocess.Popen[str]":
        """Have a command ask from a host."""
        return self.launcher.start(*self._hosts.in_network_of(host), *JITCKPT, *words)

    def suspend(self, *words: str, after: int, by: int = 1) -> Result:
        """Ask for it once all ranks have made so many steps, and let them make those that it takes."""
        self.go_to(after)
        self.wait_for_step(after)
        asked = self.ask(by, *(words or ("suspend", str(self._memory / str(by)))))
        assert asked.stdout is not None
        first = asked.stdout.readline()  # which step it is
        self.go_to(after + 9)
        result = self.launcher.finish(asked)
        return Result(result.status, first + result.out, result.err)

    def left(self) -> list[list[str]]:
        """Return in which folders of each host's directory a suspended job has left its command."""
        return [
            sorted(path.parent.name for path in (self._memory / str(host)).glob(f"host-*/{FILE_NAME}"))
            for host in HOSTS
        ]

    def wait_for_step(self, step: int) -> None:
        seen = [self.launcher.directory / f"step-{rank}" for rank in (0, 1)]
        self.launcher.wait_until(
            lambda: all(one.exists() and int(one.read_text() or 0) >= step for one in seen)
        )

    def ended(self) -> str:
        """Return what all launchers have said, which have ended as of a suspended job."""
        results = [self.launcher.finish(agent) for agent in self.agents.values()]
        said = "\n=====\n".join(one.err for one in results)
        assert [one.status for one in results] == [SAVED] * 2, said
        return said

    def resume(self, *words: str, on: Sequence[int] = HOSTS) -> None:
        """Have both parts go on, on these hosts."""
        for host, where in enumerate(on):
            elsewhere = [] if where in HOSTS else ELSEWHERE
            command = ["env", "OMP_NUM_THREADS=1", "SOFTGPU_DEVICES=1"]
            command += [f"{environment.CRIU.name}={criu_of_this_machine().program}", *JITCKPT, "resume"]
            command += [str(self._memory / str(host)), "--node-rank", str(host), *words]
            self.agents[host] = self.launcher.start(*self._hosts.in_network_of(where), *elsewhere, *command)
        self.process = self.agents[0]


def test_a_job_goes_on_on_other_hosts_from_a_shared_directory(
    launcher: Launcher, hosts: Namespaces, memory: Path, undisturbed: list[str]
) -> None:
    """They have other addresses and none of its processes."""
    locks = network_lock.tables()
    job = SuspendedJob(launcher, hosts, memory, shared=True)
    suspended = job.suspend(after=7)
    assert suspended.status == 0, suspended
    assert "It is suspended once all ranks have ended step 10." in suspended.out
    assert "job is suspended after step 10" in suspended.out
    said = job.ended()
    assert launcher.survivors() == []
    assert "is suspended after step 10: `jitckpt resume" in said
    assert job.left() == [["host-0", "host-1"]] * 2
    job.resume("--master-addr", "10.79.0.3", on=NEWCOMERS)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed, said
    assert len(job.events("suspended")) == len(job.events("gone_back")) == 1
    assert (job.snapshots(), job.left()) == ([[], []], [[], []])
    launcher.wait_until(lambda: network_lock.tables() <= locks)


def test_a_job_migrates_to_hosts_that_wait_for_it(
    launcher: Launcher, hosts: Namespaces, memory: Path, undisturbed: list[str]
) -> None:
    """At first nobody does, and it stays."""
    job = SuspendedJob(launcher, hosts, memory, shared=True)
    job.go_to(7)
    job.wait_for_step(7)
    alone = launcher.finish(job.ask(0, "migrate", str(memory / "0"), "--within", "1"))
    assert alone.status == 1
    assert "The job runs on: nobody waits for the part of host 0, 1." in alone.out
    before = job.agents
    job.agents = {}
    job.resume("--wait", "--master-addr", "10.79.0.3", on=NEWCOMERS)
    waiting, job.agents = job.agents, before
    launcher.wait_until(lambda: len(list((memory / "0").glob("waiting-*.json"))) == 2)
    assert job.suspend("migrate", str(memory / "0"), after=7).status == 0
    job.ended()
    job.agents = waiting
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed, said
    assert list((memory / "0").glob("waiting-*.json")) == []
