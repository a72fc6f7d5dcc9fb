"""`jitckpt run --snapshot-copies`: a host is lost with its disk, and its part of a snapshot is on another."""

import re
import shutil
from pathlib import Path

from hosts_job import HostsJob
from launcher import Launcher
from namespaces import Namespaces

COPIES = ("--snapshot-copies", "1")


def test_the_host_in_a_lost_ones_place_gets_its_part_from_another(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """It has another address, none of the lost one's processes, and nothing on its disk."""
    job = HostsJob(launcher, four_hosts, disks, *COPIES)
    job.snapshot()
    copied = job.wait_for("snapshot_copied")
    assert (copied["step"], copied["copies"]) == (8, 1)
    assert [sorted(path.name for path in (disks / str(host)).glob("copies*/*")) for host in (0, 1)] == [
        ["host-1"],
        ["host-0"],
    ]
    job.lose_host(1)
    shutil.rmtree(disks / "1")
    job.start_host(1, on=2)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert job.events("gone_back")[0]["step"] == 8
    assert re.search(r"this host's part of the snapshot after step 8 has come from host 0", said), said
    assert list(disks.rglob("*snapshot*")) == []


def test_a_host_of_a_lost_job_that_comes_back_with_nothing_finds_its_part(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """All launchers are killed, with their ranks; the first host has lost its disk."""
    job = HostsJob(launcher, four_hosts, disks, *COPIES)
    job.snapshot()
    job.wait_for("snapshot_copied")
    job.lose()
    job.agents[1].communicate()
    shutil.rmtree(disks / "0")
    again = HostsJob(launcher, four_hosts, disks, *COPIES)
    said = again.finish_all()
    assert re.search(r"this host's part of the snapshot after step 8 has come from host 1", said), said
    assert re.search(r"goes on from the snapshot of step 8, made at \d{4}-", said), said
    assert [*again.finals, *again.logs] == undisturbed_job, said
