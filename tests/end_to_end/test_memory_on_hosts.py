"""Jobs without replicas on several hosts, which lose hosts: all comes back from others' memory."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from namespaces import Namespaces, namespaces

TRAINING = str(Path(__file__).parent / "sharded_training.py")
HOSTS = 4
MEET = [
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "10.79.0.1:29400",
    "--rdzv-conf",
    "keep_alive_interval=1",
]
OPTIONS = ["--nproc-per-node", "1", "--device", "softgpu", "--warm-spares", "0", "--warm-start"]
THREADS = "OMP_NUM_THREADS=1"  # as torchrun has it where a host has several ranks


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(HOSTS + 1) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return alone(tmp_path_factory.mktemp("undisturbed"), HOSTS)


@pytest.fixture(scope="module")
def undisturbed_on_three(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return alone(tmp_path_factory.mktemp("undisturbed-on-three"), 3)


def alone(directory: Path, ranks: int) -> list[str]:
    """Return the digests of the same training on one host, unprotected."""
    launcher = Launcher(directory)
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", str(ranks), "--warm-start"]
    result = launcher.run(*run, "--max-restarts", "0", TRAINING, "full", "--unprotected")
    assert result.status == 0, result.err
    return digests([result.out])


def digests(outs: Sequence[str]) -> list[str]:
    return sorted(line for out in outs for line in out.splitlines() if line.startswith("full rank "))


class Job:
    """One agent with one rank on each host, and a checkpoint directory of the host's own."""

    def __init__(self, launcher: Launcher, hosts: Namespaces) -> None:
        self.launcher, self.hosts = launcher, hosts
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.outs: list[str] = []

    def start(self, host: int, *options: str, count: int = HOSTS, tier: str = "peer") -> None:
        place = self.launcher.directory / f"host-{host}"
        place.mkdir(exist_ok=True)
        run = ["env", "-C", str(place), THREADS, *JITCKPT, "run", "--nnodes", str(count), *MEET, *OPTIONS]
        run += ["--checkpoint-dir", str(place / "ckpt"), "--memory-tier", tier, *options, TRAINING, "full"]
        self.agents[host] = self.launcher.start(*self.hosts.on(host), *run, "--pause", "0.3")

    def events(self, name: str) -> list[dict[str, object]]:
        found = []
        for file in self.launcher.directory.glob("host-*/ckpt/events.jsonl"):
            found += [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        return [event for event in found if event["event"] == name]

    def lose(self, host: int) -> None:
        """Kill all processes of a host at once."""
        for pid in self.hosts.processes(host):
            os.kill(pid, signal.SIGKILL)
        self.outs.append(self.agents.pop(host).communicate()[0])

    def finish(self) -> str:
        """Wait for all agents; return what they said."""
        ends = [self.launcher.finish(agent) for agent in self.agents.values()]
        self.outs += [end.out for end in ends]
        said = "".join(end.err for end in ends)
        assert [end.status for end in ends] == [0] * len(ends), said
        return said

    def saves(self) -> list[Path]:
        return list(self.launcher.directory.glob("host-*/ckpt/step-*/*"))


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def assert_one_minibatch_at_most(job: Job, restored: Sequence[dict[str, object]]) -> None:
    """The step that was safe comes back, or the one after it, if all its holders have it by then."""
    (kept,) = {int(str(event["step"])) for event in job.events("kept_in_memory")}
    (newest,) = {int(str(event["newest"])) for event in job.events("kept_in_memory")}
    (step,) = {int(str(event["step"])) for event in restored}
    assert newest - 1 <= kept <= step <= newest


def test_a_lost_host_comes_back_on_a_standby_host_from_memory(job: Job, undisturbed: list[str]) -> None:
    for host in range(HOSTS):
        job.start(host)
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(HOSTS)  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(2)
    said = job.finish()
    assert digests(job.outs) == undisturbed
    restored = job.events("restored")
    assert len({event["step"] for event in restored}) == 1
    assert all(event["in_memory"] for event in restored)
    assert job.saves() == [], "no file was written"
    assert re.search(r"the state after step \d+ is in memory", said), said
    assert_one_minibatch_at_most(job, restored)
    assert "has fetched its ranks' state from other hosts' memory" in said
    assert job.launcher.survivors() == []


def test_a_lost_host_is_decoded_from_parity_on_a_standby_host(
    job: Job, undisturbed_on_three: list[str]
) -> None:
    for host in range(3):
        job.start(host, count=3, tier="parity")
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(3, count=3, tier="parity")  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(2)
    said = job.finish()
    assert digests(job.outs) == undisturbed_on_three
    restored = job.events("restored")
    assert len({event["step"] for event in restored}) == 1
    assert all(event["in_memory"] for event in restored)
    assert job.saves() == [], "no file was written"
    assert_one_minibatch_at_most(job, restored)
    assert any(
        "from parity in other hosts' memory" in str(one["reason"]) for one in job.events("memory_sources")
    )
    assert "with parity over 3 hosts, of which one may be lost" in said
    assert job.launcher.survivors() == []
