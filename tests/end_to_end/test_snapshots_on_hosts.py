"""`jitckpt run --snapshot-every` on two hosts: all go back to the same snapshot, whoever has failed."""

import re
from pathlib import Path

from hosts_job import HostsJob
from launcher import Launcher
from namespaces import Namespaces
from snapshot_job import KILL


def test_all_hosts_go_back_if_a_rank_of_one_dies(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    job = HostsJob(launcher, four_hosts, disks, "--fault", KILL)
    whole = job.snapshot()
    assert job.snapshots() == [["snapshot-0000000008"]] * 2
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert job.events("gone_back")[0]["step"] == whole["step"] == 8
    assert "all ranks go back to the snapshot after step 8" in said
    assert job.snapshots() == [[], []]


def test_a_lost_job_goes_on_from_what_all_hosts_have(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """All launchers are killed, with their ranks; one host's part of the newest snapshot is damaged."""
    job = HostsJob(launcher, four_hosts, disks)
    job.snapshot()
    newest = job.wait_for("snapshot_wanted", 2)["step"]
    job.go_to(13)
    job.wait_for("snapshot", 2)
    job.lose()
    job.agents[1].communicate()
    (core, *_) = (disks / "1" / "host-1").glob(f"snapshot-*{newest}/rank-1/core-*.img")
    core.write_bytes(core.read_bytes()[:-1] + b"?")
    again = HostsJob(launcher, four_hosts, disks)
    said = again.finish_all()
    assert re.search(r"goes on from the snapshot of step 8, made at \d{4}-", said), said
    why = rf"the snapshot after step {newest} is of no use: .*{core.name} is not what was written. \(host 1"
    assert re.search(why, said), said
    assert [*again.finals, *again.logs] == undisturbed_job, said
    assert again.snapshots() == [[], []]


def test_another_host_goes_on_in_the_place_of_a_lost_one(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """Where all share the directory: it has none of the lost one's processes, and another address."""
    (disks / "0").mkdir()
    (disks / "1").symlink_to("0")
    job = HostsJob(launcher, four_hosts, disks)
    job.snapshot()
    assert sorted(path.name for path in (disks / "0").glob("host-*")) == ["host-0", "host-1"]
    job.lose_host(1)
    job.start_host(1, on=2)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert job.events("gone_back")[0]["step"] == 8
