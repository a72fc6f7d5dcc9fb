"""`jitckpt run --coordination etcd://...` on several hosts, with real etcd members in their namespaces."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from campaign import halves
from etcd_cluster import Cluster, etcd
from gpt import TRAINING, digests
from launcher import Launcher, until_told
from namespaces import Namespaces, namespaces
from test_hosts import PAUSING, Job, await_line

from jitckpt.events import read_events


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(3) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, hosts: Namespaces) -> Iterator[Cluster]:
    """Of three members, one on each host."""
    addresses = [f"10.79.0.{host + 1}" for host in range(3)]
    on = [hosts.on(host) for host in range(3)]
    folder = tmp_path_factory.mktemp("etcd")
    with etcd(folder, 3, addresses=addresses, on=on) as found:
        yield found


@pytest.fixture(autouse=True)
def whole(cluster: Cluster) -> None:
    """Before each test all members are there."""
    for member, process in enumerate(cluster.members):
        if process.poll() is not None:
            cluster.start(member)
    cluster.wait()


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


@pytest.fixture
def patient(cluster: Cluster) -> list[str]:
    """For jobs that lose no host, however busy this machine is."""
    return ["--coordination", cluster.url, "--rdzv-id", uuid4().hex, "--host-timeout", "60"]


@pytest.fixture
def meet(patient: list[str]) -> list[str]:
    return [*patient, "--host-timeout", "5"]


def ended_well(job: Job, *agents: "subprocess.Popen[str]") -> tuple[str, str]:
    ends = [job.launcher.finish(agent) for agent in agents]
    err = "".join(end.err for end in ends)
    assert [end.status for end in ends] == [0] * len(agents), err
    return "".join(end.out for end in ends), err


def test_a_killed_rank_changes_no_bit(job: Job, patient: list[str], undisturbed: list[str]) -> None:
    command = ["--fault", "rank=1 step=12 phase=backward kind=kill", job.launcher.script(PAUSING), *TRAINING]
    (job.launcher.directory / "go").touch()
    out, err = ended_well(job, *(job.start(host, *command, meet=patient) for host in (0, 1)))
    assert digests(out) == undisturbed
    assert "The job succeeded after 1 restart." in err
    events, _ = read_events(job.launcher.directory / "ckpt")
    assert [event for event in events if event["event"] == "warning"] == [], "the hosts met at once"


def test_the_leader_of_three_members_is_lost_and_then_a_rank(
    job: Job, cluster: Cluster, patient: list[str], undisturbed: list[str]
) -> None:
    command = ["--fault", "rank=1 step=5 phase=backward kind=kill", job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=patient) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    cluster.kill(cluster.leader())
    (job.launcher.directory / "go").touch()
    out, err = ended_well(job, *agents)
    assert digests(out) == undisturbed
    assert "The job succeeded after 1 restart." in err


# A rank tells which process it runs in.
TELLING = """
import os, pathlib

pathlib.Path("pid-{JITCKPT_RESTART}-{RANK}".format(**os.environ)).write_text(str(os.getpid()))
"""


def warm_processes(job: Job, host: int) -> list[int]:
    """Return the processes that have loaded torch, or will have: the first, and those forked from it."""
    found = []
    for pid in job.hosts.processes(host):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"jitckpt.worker.spare" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_lost_host_is_replaced_by_one_that_stands_by(
    job: Job, meet: list[str], undisturbed: list[str]
) -> None:
    """With the host goes its member of etcd. What its rank runs in had loaded torch. It is reported."""
    meet += ["--report-host", 'echo "$3 $1: $2" >> reported']
    command = [job.launcher.script(TELLING + PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=meet) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    spare = job.start(2, *command, meet=meet)
    until_told(spare, "this host stands by")
    job.launcher.wait_until(lambda: len(warm_processes(job, 2)) == 2)
    warm = warm_processes(job, 2)
    job.kill(1)
    await_line(agents[0], "pauses\n")
    (job.launcher.directory / "go").touch()
    out, _ = ended_well(job, agents[0], spare)
    assert digests(out) == undisturbed
    assert int((job.launcher.directory / "pid-1-1").read_text()) in warm
    reported = (job.launcher.directory / "reported").read_text().splitlines()
    assert len(reported) == 1
    assert reported[0].startswith(f"lost {socket.gethostname()}: ")


def test_one_that_falls_ill_while_it_stands_by_is_taken_when_its_check_passes(
    job: Job, meet: list[str], undisturbed: list[str]
) -> None:
    command = [job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=meet) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    spare = job.start(2, "--health-check", "test ! -e ill", *command, meet=meet)
    until_told(spare, "this host stands by")
    ill = job.launcher.directory / "ill"
    ill.touch()
    job.kill(1)
    told = until_told(spare, "this host is not taken: ")
    assert "the job goes on without this host: " in told
    (job.launcher.directory / "go").touch()
    ill.unlink()
    out, _ = ended_well(job, agents[0], spare)
    assert digests(out) == undisturbed


def test_a_killed_agent_may_come_again(job: Job, meet: list[str], undisturbed: list[str]) -> None:
    command = [job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=meet) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    agents[1].kill()
    again = job.start(1, *command, meet=meet)
    await_line(agents[0], "pauses\n")
    (job.launcher.directory / "go").touch()
    out, _ = ended_well(job, agents[0], again)
    assert digests(out) == undisturbed


def test_a_new_set_of_agents_goes_on_only_where_the_last_is_known_to_be_dead(
    job: Job, meet: list[str], undisturbed: list[str]
) -> None:
    command = [job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=meet) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    for agent in agents:
        agent.kill()
    (job.launcher.directory / "go").touch()
    careful = job.start(0, *command, meet=meet)
    assert "was not seen to end" in until_told(careful, "was not seen to end")
    careful.send_signal(signal.SIGTERM)
    assert job.launcher.finish(careful).status == 1
    sure = [job.start(host, "--silent-hosts", "dead", *command, meet=meet) for host in (0, 1)]
    out, _ = ended_well(job, *sure)
    assert digests(out) == undisturbed


def test_a_host_that_is_cut_off_has_no_part_any_more(
    job: Job, meet: list[str], undisturbed: list[str]
) -> None:
    """Host 0 sees nobody for a while: the others go on without it, and it stands by when it comes back."""
    command = [job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=meet) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    spare = job.start(2, *command, meet=meet)
    until_told(spare, "this host stands by")
    with job.hosts.cable_cut():
        await_line(spare, "pauses\n")
    until_told(agents[0], "this host stands by")
    (job.launcher.directory / "go").touch()
    out, err = ended_well(job, agents[1], spare, agents[0])
    assert digests(out) == undisturbed
    assert "this host stood by and was not needed" in err


def contents(directory: Path) -> dict[str, bytes]:
    """Return what lies in a checkpoint directory, but for what is written anew all the time."""
    files = (path for path in directory.rglob("*") if path.is_file() and "progress-" not in path.name)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_a_stopped_host_that_wakes_late_writes_nothing_into_the_job(
    job: Job, cluster: Cluster, meet: list[str], undisturbed: list[str]
) -> None:
    """Host 0, which has led, stands still for longer than its lease, and the others go on without it."""
    directory = job.launcher.directory / "ckpt"
    command = [job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, meet=meet) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    spare = job.start(2, *command, meet=meet)
    until_told(spare, "this host stands by")
    stopped = [pid for pid in job.hosts.processes(0) if pid != cluster.members[0].pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    await_line(spare, "pauses\n")
    before = contents(directory)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    told = until_told(agents[0], "this host stands by")
    assert "The job has gone on without this host: start 2 has begun" in told
    assert contents(directory) == before
    (job.launcher.directory / "go").touch()
    out, _ = ended_well(job, agents[1], spare, agents[0])
    assert digests(out) == undisturbed
    assert halves.found(halves.read([directory])) == []
