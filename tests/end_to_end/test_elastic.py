"""`jitckpt run --min-hosts`: a job goes on with fewer hosts, and takes in others when they come.

Real trainings on softgpu, in network namespaces, a rank a host.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from launcher import JITCKPT, JITCKPT_RUN, Launcher, Result, until_told
from namespaces import Namespaces, ip, namespaces

TRAINING = str(Path(__file__).parent / "elastic_training.py")
SAMPLES, GLOBAL_BATCH, STEPS = 96, 24, 16
OPTIONS = ["--device", "softgpu", "--warm-spares", "0", "--warm-start", "--checkpoint-dir", "ckpt"]
# Torch takes a host for dead after three times this.
MEET = [
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "10.79.0.1:29400",
    "--rdzv-conf",
    "keep_alive_interval=1",
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


class Job:
    """One agent on each host, a rank each."""

    def __init__(self, launcher: Launcher, hosts: Namespaces) -> None:
        self.launcher, self.hosts = launcher, hosts

    def start(self, host: int, *training: str, least: int = 2, wait: float = 4) -> "subprocess.Popen[str]":
        elastic = ["--nnodes", "4", "--min-hosts", str(least), "--wait", str(wait), "--nproc-per-node", "1"]
        command = ["env", "OMP_NUM_THREADS=1", *JITCKPT, "run", *MEET, *elastic, *OPTIONS, TRAINING]
        return self.launcher.start(*self.hosts.on(host), *command, *training)

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once."""
        for pid in ip(f"netns pids {self.hosts.names[host]}").stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def await_line(agent: "subprocess.Popen[str]", text: str) -> str:
    """Return what an agent's ranks print up to this line."""
    assert agent.stdout is not None
    printed = ""
    for line in agent.stdout:
        printed += line
        if line == text + "\n":
            return printed
    raise AssertionError(printed + agent.communicate()[1])


def told_schedule(launcher: Launcher, pieces: Sequence[tuple[int, int]]) -> str:
    """Return what a job prints that is started with these ranks, each time up to this step.

    It is no elastic one: it saves after each step, is ended by its own script, and started anew by hand.
    """
    printed = ""
    for ranks, last in pieces:
        run = [*JITCKPT_RUN, "--nproc-per-node", str(ranks), "--max-restarts", "0", "--reshard", *OPTIONS]
        how = ["--accumulation", str(12 // ranks), "--save-every", "1", "--stop-after", str(last)]
        result = launcher.run(*run, TRAINING, *how)
        assert result.status == (0 if last == STEPS else 1), result.err
        printed += result.out
    return printed


def curve(printed: str) -> dict[tuple[int, int], str]:
    """Return what each rank has had in each step: its loss and its samples, as made last."""
    found = re.findall(r"^step (\d+) rank (\d) of (\d: .*)$", printed, re.MULTILINE)
    return {(int(step), int(rank)): rest for step, rank, rest in found}


def ends(printed: str) -> list[str]:
    return sorted(line for line in printed.splitlines() if "ends with" in line)


def check_samples(steps: dict[tuple[int, int], str]) -> None:
    """Check that each step had the samples of its place in the order, each once, whoever made it."""
    for step in range(1, STEPS + 1):
        had = sorted(
            int(number)
            for (made, _), rest in steps.items()
            if made == step
            for number in re.findall(r"\d+", rest.partition("[")[2])
        )
        epoch, place = divmod(step - 1, SAMPLES // GLOBAL_BATCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        assert had == sorted(order[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH]), step


def finish(job: Job, agents: Sequence["subprocess.Popen[str]"]) -> list[Result]:
    results = [job.launcher.finish(agent) for agent in agents]
    assert [result.status for result in results] == [0] * len(agents), "\n".join(one.err for one in results)
    return results


def test_a_job_goes_on_without_a_lost_host(job: Job, tmp_path: Path) -> None:
    agents = [job.start(host, "--stay", "4:5", least=3) for host in range(4)]
    printed = await_line(agents[0], "stays at 5")
    job.kill(3)
    results = finish(job, agents[:3])
    printed += agents[3].communicate()[0] + "".join(result.out for result in results)
    assert "the job goes on with 3 of 4 hosts" in results[0].err
    assert "each makes 4 micro-batches a step in the place of 3" in results[0].err
    (tmp_path / "told").mkdir()
    told = told_schedule(Launcher(tmp_path / "told"), [(4, 5), (3, STEPS)])
    assert {at: rest for at, rest in curve(printed).items() if at != (6, 3)} == curve(told)
    assert ends(printed) == ends(told) != []
    check_samples(curve(told))
