"""`jitckpt run --snapshot-every` on two hosts: all go back to the same snapshot, whoever has failed."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from launcher import JITCKPT, Launcher, Result
from namespaces import Namespaces, namespaces
from snapshot_job import EVERY, KILL, SCRIPT, STEPS, Job, in_memory, undisturbed_training
from test_standby import ELSEWHERE, MEET

from jitckpt.events import FILE_NAME, Event, read_events
from jitckpt.wire import environment

HOSTS = (0, 1)


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(3) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return undisturbed_training(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def memory(launcher: Launcher) -> Iterator[Path]:
    """Give where the hosts' directories are."""
    with in_memory(launcher.directory / "disks") as folder:
        yield folder


class HostsJob(Job):
    """Two hosts of a rank each, with directories of their own, that go as far as they are let."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Namespaces,
        memory: Path,
        *words: str,
        meet: Sequence[str] = MEET,
        held: Sequence[str] = ("--snapshot-every", str(EVERY)),
    ) -> None:
        self.launcher, self.folder, self._memory = launcher, memory / "0", memory
        script = launcher.script(SCRIPT.replace("LOADERS", "0"))
        self.go_to(0)
        program = criu_of_this_machine().program
        command = ["env", "OMP_NUM_THREADS=1", "SOFTGPU_DEVICES=1", f"{environment.CRIU.name}={program}"]
        command += [*JITCKPT, "run", *meet, "--nproc-per-node", "1", "--device", "softgpu"]
        command += ["--mode", "transparent", *held, "--warm-spares", "0", *words]
        self._hosts = hosts
        self._commands = [
            [*command, "--node-rank", str(host), "--checkpoint-dir", str(memory / str(host)), script]
            for host in HOSTS
        ]
        self.agents: dict[int, subprocess.Popen[str]] = {}
        for host in HOSTS:
            self.start_host(host)
        self.process = self.agents[0]
        self.results: list[Result] = []

    def start_host(self, host: int, on: int | None = None) -> None:
        """Start a host. on: another machine in its place."""
        elsewhere = [] if on is None else ELSEWHERE
        network = self._hosts.in_network_of(host if on is None else on)
        self.agents[host] = self.launcher.start(*network, *elsewhere, *self._commands[host])

    def lose_host(self, host: int) -> None:
        """Kill all of its processes."""
        for pid in self._hosts.processes(host):
            os.kill(pid, signal.SIGKILL)
        self.agents[host].communicate()

    def finish_all(self) -> str:
        """Let the ranks come to the end; return what the launchers have said."""
        self.go_to(STEPS)
        self.results = [self.launcher.finish(agent) for agent in self.agents.values()]
        said = "\n=====\n".join(one.err for one in self.results)
        assert [one.status for one in self.results] == [0, 0], said
        assert self.launcher.survivors() == [], said
        return said

    @property
    def finals(self) -> list[str]:
        return sorted(re.findall(r"^rank \d: .*$", "".join(one.out for one in self.results), re.MULTILINE))

    def events(self, name: str) -> list[Event]:
        if not (self.folder / FILE_NAME).exists():
            return []
        return [event for event in read_events(self.folder)[0] if event["event"] == name]

    def snapshots(self) -> list[list[str]]:
        """Return the names of those that each host has."""
        return [
            sorted(path.name for path in (self._memory / str(host)).glob("host-*/*snapshot-*"))
            for host in HOSTS
        ]


def test_all_hosts_go_back_if_a_rank_of_one_dies(
    launcher: Launcher, hosts: Namespaces, memory: Path, undisturbed: list[str]
) -> None:
    job = HostsJob(launcher, hosts, memory, "--fault", KILL)
    whole = job.snapshot()
    assert job.snapshots() == [["snapshot-0000000008"]] * 2
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed, said
    assert job.events("gone_back")[0]["step"] == whole["step"] == 8
    assert "all ranks go back to the snapshot after step 8" in said
    assert job.snapshots() == [[], []]


def test_a_lost_job_goes_on_from_what_all_hosts_have(
    launcher: Launcher, hosts: Namespaces, memory: Path, undisturbed: list[str]
) -> None:
    """All launchers are killed, with their ranks; one host's part of the newest snapshot is damaged."""
    job = HostsJob(launcher, hosts, memory)
    job.snapshot()
    newest = job.wait_for("snapshot_wanted", 2)["step"]
    job.go_to(13)
    job.wait_for("snapshot", 2)
    job.lose()
    job.agents[1].communicate()
    (core, *_) = (memory / "1" / "host-1").glob(f"snapshot-*{newest}/rank-1/core-*.img")
    core.write_bytes(core.read_bytes()[:-1] + b"?")
    again = HostsJob(launcher, hosts, memory)
    said = again.finish_all()
    assert re.search(r"goes on from the snapshot of step 8, made at \d{4}-", said), said
    why = rf"the snapshot after step {newest} is of no use: .*{core.name} is not what was written. \(host 1"
    assert re.search(why, said), said
    assert [*again.finals, *again.logs] == undisturbed, said
    assert again.snapshots() == [[], []]


def test_another_host_goes_on_in_the_place_of_a_lost_one(
    launcher: Launcher, hosts: Namespaces, memory: Path, undisturbed: list[str]
) -> None:
    """Where all share the directory: it has none of the lost one's processes, and another address."""
    (memory / "0").mkdir()
    (memory / "1").symlink_to("0")
    job = HostsJob(launcher, hosts, memory)
    job.snapshot()
    assert sorted(path.name for path in (memory / "0").glob("host-*")) == ["host-0", "host-1"]
    job.lose_host(1)
    job.start_host(1, on=2)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed, said
    assert job.events("gone_back")[0]["step"] == 8
