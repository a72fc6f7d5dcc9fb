"""Two hosts that meet at etcd go back to snapshots of all ranks, and are suspended as a whole."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from etcd_cluster import etcd
from hosts_job import HostsJob, SuspendedJob
from launcher import Launcher
from namespaces import Namespaces
from snapshot_job import KILL


@pytest.fixture
def meet(tmp_path: Path, four_hosts: Namespaces) -> Iterator[list[str]]:
    """Have an etcd of one member on a host that has no part in the job."""
    with etcd(tmp_path, 1, addresses=["10.79.0.4"], on=[four_hosts.on(3)]) as found:
        yield ["--nnodes", "2", "--coordination", found.url, "--rdzv-id", uuid4().hex]


def test_all_go_back_if_a_rank_dies(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str], meet: list[str]
) -> None:
    job = HostsJob(launcher, four_hosts, disks, "--fault", KILL, meet=meet, placed=False)
    whole = job.snapshot()
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert job.events("gone_back")[0]["step"] == whole["step"] == 8


def test_a_lost_job_goes_on_with_each_host_in_its_place(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str], meet: list[str]
) -> None:
    """Nobody is told one: each finds snapshots of its own."""
    job = HostsJob(launcher, four_hosts, disks, meet=meet, placed=False)
    job.snapshot()
    job.lose()
    job.agents[1].communicate()
    again = HostsJob(launcher, four_hosts, disks, "--silent-hosts", "dead", meet=meet, placed=False)
    said = again.finish_all()
    assert "goes on from the snapshot of step 8" in said
    assert [*again.finals, *again.logs] == undisturbed_job, said
    assert again.snapshots() == [[], []]


def test_a_suspended_job_goes_on_with_its_parts_in_their_places(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str], meet: list[str]
) -> None:
    """The host with the second part has a lower address now, and comes first."""
    job = SuspendedJob(launcher, four_hosts, disks, meet=meet, placed=False, shared=True)
    assert job.suspend(after=7).status == 0
    job.ended()
    job.resume(on=(2, 0))
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert len(job.events("suspended")) == len(job.events("gone_back")) == 1
    assert (job.snapshots(), job.left()) == ([[], []], [[], []])
