"""Unchanged programs without replicas lose a host: what its rank held is in the other host's memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cases import PROGRAMS
from jobs import LIMIT, MAIN, Ends, skip_unless_installed, until
from namespaces import Namespaces, kill, namespaces

HOSTS = 2
LOST = 1
# A name that says where the first host is, and an agent that is sure soon that another host is away.
MEET = ("--rdzv-endpoint", "10.79.0.1:29400", "--rdzv-conf", "keep_alive_interval=1")

# One thread, as torchrun has it where a host has several ranks, as the undisturbed run's.
FIXED = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(HOSTS) as found:
        yield found


class Job:
    """One agent with one rank on each host, and a folder of the host's own."""

    def __init__(self, name: str, hosts: Namespaces, folder: Path) -> None:
        self.program, self.hosts, self.folder = PROGRAMS[name], hosts, folder
        self.agents: list[subprocess.Popen[str]] = []
        self.said = ""

    def start(self, host: int, **environment: str) -> "subprocess.Popen[str]":
        place = self.folder / f"host-{host}"
        (place / "out").mkdir(parents=True, exist_ok=True)
        command = [*self.hosts.on(host), sys.executable, "-c", MAIN, "run", "--nnodes", str(HOSTS)]
        command += ["--rdzv-backend", "c10d", *MEET, "--nproc-per-node", "1", "--device", "softgpu"]
        command += ["--hang-timeout", "60", "--memory-tier", "auto", str(self.program.path), "out"]
        with open(place / "said", "a") as said:
            agent = subprocess.Popen(
                command,
                cwd=place,
                env=os.environ | FIXED | dict(self.program.environment) | environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.agents.append(agent)
        return agent

    def all_said(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*/said")))

    def ends(self) -> Ends:
        found = {}
        for file in self.folder.glob("host-*/out/end-*.json"):
            found[file.name] = json.loads(file.read_text())
        return found


@pytest.fixture
def job(request: pytest.FixtureRequest, hosts: Namespaces, tmp_path: Path) -> Iterator[Job]:
    skip_unless_installed(PROGRAMS[request.param])
    with ExitStack() as stack:
        made = Job(request.param, hosts, tmp_path)
        stack.callback(kill, hosts, *range(HOSTS))
        yield made


@pytest.mark.parametrize(
    "job",
    [
        "deepspeed, ZeRO-1 in memory",
        "deepspeed, ZeRO-2 in memory",
        "accelerate, FSDP2",
        "transformers, FSDP2",
    ],
    indirect=True,
)
def test_ends_as_undisturbed(job: Job, plain: Callable[[str, int], Ends]) -> None:
    (name,) = (name for name, program in PROGRAMS.items() if program is job.program)
    there = job.folder / "there"  # written by a rank that has come to where its host is lost
    first = job.start(0)
    lost = job.start(LOST, STAYS=f"6:{there}")
    until(there.exists, lambda: lost.poll() is None, job.all_said)
    kill(job.hosts, LOST)
    lost.wait(timeout=LIMIT)
    (job.folder / f"host-{LOST}").rename(job.folder / "lost")  # what was on its disks
    again = job.start(LOST)
    assert [one.wait(timeout=LIMIT) for one in (first, again)] == [0, 0], job.all_said()[-9000:]
    said = job.all_said()
    ends = {key: value for key, value in plain(name, HOSTS).items() if key.startswith("end-")}
    assert job.ends() == ends, said[-6000:]
    assert "has fetched its ranks' state from other hosts' memory" in said, said[-9000:]
    assert "Restart 1 went on from step 5" in said, said[-9000:]
