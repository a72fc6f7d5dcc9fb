"""`jitckpt run --coordination etcd://...` on several hosts, with real etcd members in their namespaces."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from etcd_cluster import Cluster, etcd
from gpt import TRAINING, digests
from launcher import Launcher
from namespaces import Namespaces, namespaces
from test_hosts import PAUSING, Job, await_line, until_told

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


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


@pytest.fixture
def meet(cluster: Cluster) -> list[str]:
    return ["--coordination", cluster.url, "--rdzv-id", uuid4().hex, "--host-timeout", "5"]


def ended_well(job: Job, *agents: "subprocess.Popen[str]") -> tuple[str, str]:
    ends = [job.launcher.finish(agent) for agent in agents]
    err = "".join(end.err for end in ends)
    assert [end.status for end in ends] == [0] * len(agents), err
    return "".join(end.out for end in ends), err


def test_a_killed_rank_changes_no_bit(job: Job, meet: list[str], undisturbed: list[str]) -> None:
    command = ["--fault", "rank=1 step=12 phase=backward kind=kill", job.launcher.script(PAUSING), *TRAINING]
    (job.launcher.directory / "go").touch()
    out, err = ended_well(job, *(job.start(host, *command, meet=meet) for host in (0, 1)))
    assert digests(out) == undisturbed
    assert "The job succeeded after 1 restart." in err
    events, _ = read_events(job.launcher.directory / "ckpt")
    assert [event for event in events if event["event"] == "warning"] == [], "the hosts met at once"
