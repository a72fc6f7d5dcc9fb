"""`jitckpt run --min-hosts`: a job goes on with fewer hosts, and takes in others when they come.

Real trainings on softgpu, in network namespaces, a rank a host.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from launcher import JITCKPT_RUN, Launcher, Result, until_told
from namespaces import Namespaces, kill, namespaces
from programs_of_tests import text_of
from test_memory_on_hosts import MEET

from jitckpt.events import Event, read_events
from jitckpt.wire.exit_statuses import HOSTS_MISSING

TRAINING = str(Path(__file__).parent / "elastic_training.py")
SAMPLES, GLOBAL_BATCH, STEPS = 96, 24, 16
# `jitckpt`, which goes on once so many have loaded what they need: they come together at once, and none lets
# the others wait for longer than they wait for a host that is missing.
TOGETHER = text_of("elastic_together")
OPTIONS = ["--device", "softgpu", "--warm-spares", "0", "--warm-start", "--checkpoint-dir", "ckpt"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


class Job:
    """One agent on each host, a rank each."""

    def __init__(self, launcher: Launcher, hosts: Namespaces) -> None:
        self.launcher, self.hosts = launcher, hosts

    def start(
        self,
        host: int,
        *training: str,
        count: int = 4,
        least: int = 3,
        most: float = 600,
        options: Sequence[str] = (),
    ) -> "subprocess.Popen[str]":
        """count, least: of the job's hosts. most: seconds that the hosts may take to come together."""
        elastic = ["--nnodes", str(count), "--min-hosts", str(least), "--wait", "4", "--nproc-per-node", "1"]
        # Torch takes a host for dead after three times the interval.
        meet = [*MEET, "--rdzv-conf", f"keep_alive_interval=1,join_timeout={most}"]
        jitckpt = [sys.executable, "-c", TOGETHER, str(count)]
        command = ["env", "OMP_NUM_THREADS=1", *jitckpt, "run", *meet, *elastic, *OPTIONS, *options, TRAINING]
        return self.launcher.start(*self.hosts.on(host), *command, *training)

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once."""
        kill(self.hosts, host)


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def await_step(agents: Sequence["subprocess.Popen[str]"], step: int) -> str:
    """Return what the ranks of these agents print up to this step, which they all have made then."""
    printed = ""
    for agent in agents:
        assert agent.stdout is not None
        for line in agent.stdout:
            printed += line
            if line.startswith(f"step {step} "):
                break
        else:
            raise AssertionError(printed + agent.communicate()[1])
    return printed


def told_schedule(launcher: Launcher, pieces: Sequence[tuple[int, int]], *training: str) -> str:
    """Return what a job prints that is started with these ranks, each time up to this step.

    It is no elastic one: it saves after each step, is ended by its own script, and started anew by hand.
    """
    printed = ""
    for ranks, last in pieces:
        run = [*JITCKPT_RUN, "--nproc-per-node", str(ranks), "--max-restarts", "0", "--reshard", *OPTIONS]
        how = ["--accumulation", str(12 // ranks), "--save-every", "1"]
        how += [] if last == STEPS else ["--stop-after", str(last)]
        result = launcher.run(*run, TRAINING, *training, *how)
        assert result.status == (0 if last == STEPS else 1), result.err
        printed += result.out
    return printed


def curve(printed: str) -> dict[tuple[int, int], str]:
    """Return what each rank has had in each step: its loss and its samples, as made last."""
    found = re.findall(r"^step (\d+) rank (\d) of (\d: .*)$", printed, re.MULTILINE)
    return {(int(step), int(rank)): rest for step, rank, rest in found}


def by_so_many(
    steps: Mapping[tuple[int, int], str], pieces: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """Return what is left where each step is one of the first piece, of ranks up to a step, that has it."""
    ranks = {step: next(count for count, last in pieces if step <= last) for step in range(1, STEPS + 1)}
    return {key: rest for key, rest in steps.items() if rest.startswith(f"{ranks[key[0]]}: ")}


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


def test_a_job_goes_on_with_fewer_hosts_and_grows_back(job: Job, tmp_path: Path) -> None:
    """From 4 hosts to 3 and back: each loss, each sample and each bit as of a job that is told to."""
    training = ["--stay", "4:5", "3:9"]
    agents = [job.start(host, *training) for host in range(4)]
    printed = await_step(agents, 5)
    job.kill(3)
    printed += await_step(agents[:3], 9)
    printed += agents[3].communicate()[0]
    agents[3] = job.start(3, *training)
    results = finish(job, agents)
    printed += "".join(result.out for result in results)
    assert "the job goes on with 3 of 4 hosts" in results[0].err
    assert "each makes 4 micro-batches a step in the place of 3" in results[0].err
    assert "1 host beyond 3 waits to be taken in" in results[0].err
    assert "the job goes on with all 4 hosts" in results[0].err
    assert "this host waits: the job goes on without it" in results[3].err
    check_samples(curve(printed))

    (tmp_path / "told").mkdir()
    told = told_schedule(Launcher(tmp_path / "told"), [(4, 5), (3, 9), (4, STEPS)])
    assert curve(printed) == curve(told)
    assert ends(printed) == ends(told) != []


@pytest.mark.parametrize("tier", ["peer", "peer+optimizer", "sharded+parity=4"])
def test_what_no_replica_has_goes_on_from_memory_with_fewer_hosts_and_grows_back(
    job: Job, tmp_path: Path, tier: str
) -> None:
    """The same where each rank alone has its part: what a lost host had is in another one's memory.

    Or all have the same, of which each has a part in memory, and all are killed as the host is lost.
    """
    form = [] if tier.startswith("sharded") else ["--full"]
    die = tmp_path / "die"
    training = [*form, "--stay", "4:5", "3:9", "--dies-with", str(die)]
    start = partial(job.start, options=["--memory-tier", tier])
    agents = [start(host, *training) for host in range(4)]
    printed = await_step(agents, 5)

    def events(name: str) -> list[Event]:
        return [event for event in read_events(tmp_path / "ckpt")[0] if event["event"] == name]

    job.launcher.wait_until(lambda: events("memory_safe") != [])
    if not form:
        die.touch()
    job.kill(3)
    printed += await_step(agents[:3], 9)
    printed += agents[3].communicate()[0]
    agents[3] = start(3, *training)
    results = finish(job, agents)
    printed += "".join(result.out for result in results)
    said = "".join(result.err for result in results)
    assert "to be cut anew for 3 ranks" in said
    assert (events("memory_optimizer") != []) == tier.endswith("+optimizer")
    assert "whole copies" not in said, "the host's steps are the device's bit for bit"
    replicas = {event["restart"]: event for event in events("memory_placement")}
    assert [len(replicas[start]["hosts"]) for start in range(3)] == [4, 3, 4]
    assert "was in memory, and was written to files from there" in results[0].err
    assert "the job goes on with 3 of 4 hosts" in results[0].err
    assert "the job goes on with all 4 hosts" in results[0].err
    from_memory, from_saves = sorted({event["step"] for event in events("restored")})
    assert from_memory in (3, 4, 5)
    assert from_saves == 9, "all ranks have saved it: nothing is done again to take in a host"
    assert not any(event["in_memory"] for event in events("restored"))

    (tmp_path / "told").mkdir()
    pieces = [(4, from_memory), (3, 9), (4, STEPS)]
    told = told_schedule(Launcher(tmp_path / "told"), pieces, *form)
    steps = by_so_many(curve(printed), pieces)
    check_samples(steps)
    assert steps == curve(told)
    assert ends(printed) == ends(told) != []


def test_a_host_that_is_gone_again_is_not_waited_for_and_one_alone_never_goes_on(job: Job) -> None:
    """Of three hosts one is lost, and is lost once more as it is taken in; then the second one is."""
    # Behind step 7 if the third one has been taken in before it is lost.
    training = ["--accumulation", "4", "--stay", "3:2", "2:6", "3:7", "2:9"]
    start = partial(job.start, count=3, least=2, most=60)
    agents = [start(host, *training) for host in range(3)]
    await_step(agents, 2)
    job.kill(2)
    await_step(agents[:2], 6)
    agents[2] = start(2, *training)
    told = until_told(agents[0], "1 host beyond 2 waits to be taken in")
    assert "the job goes on with 2 of 3 hosts" in told
    job.kill(2)
    await_step(agents[:2], 9)
    job.kill(1)
    last = job.launcher.finish(agents[0])
    assert last.status == HOSTS_MISSING, last.err
    assert "waiting for others in the place of host 1 (10.79.0.2), for at most 60 s" in last.err
    assert "2 hosts did not come together in 60 s" in last.err
    assert "the state after step 9 is saved" in last.err
