"""`jitckpt run` on two hosts: real trainings on softgpu, in network namespaces."""

import subprocess
from collections.abc import Iterator

import pytest
from gpt import TRAINING, digests
from launcher import JITCKPT, Launcher
from namespaces import Namespaces, namespaces

STORE = "10.79.0.1:29400"
RUN = [*JITCKPT, "run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", STORE]
# As torchrun has it where a host has several ranks: sums depend on it.
THREADS = ["env", "OMP_NUM_THREADS=1"]
OPTIONS = ["--nproc-per-node", "1", "--device", "softgpu", "--warm-spares", "0"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces() as found:
        yield found


class Job:
    """One agent on each host."""

    def __init__(self, launcher: Launcher, hosts: Namespaces) -> None:
        self.launcher, self.hosts = launcher, hosts

    def start(self, host: int, *command: str) -> "subprocess.Popen[str]":
        return self.launcher.start(*self.hosts.on(host), *THREADS, *RUN, *OPTIONS, *command)


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def test_a_killed_rank_on_one_host_changes_no_bit(job: Job, undisturbed: list[str]) -> None:
    """The ranks of both hosts save and start again, and one of the agents tells of it."""
    fault = "rank=1 step=6 phase=backward kind=kill"
    agents = [job.start(host, "--fault", fault, *TRAINING) for host in (0, 1)]
    first, second = (job.launcher.finish(agent) for agent in agents)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert digests(first.out + second.out) == undisturbed
    assert "The state after step 5 was saved" in first.err
    assert "Restart 1 went on from step 5, with at most 1 minibatch done again" in first.err
    assert "The job succeeded after 1 restart." in first.err
    assert "own state" not in first.err + second.err, "no rank lost what it alone knew"
    assert "jitckpt:" not in second.err, "one agent is enough to tell of it"
