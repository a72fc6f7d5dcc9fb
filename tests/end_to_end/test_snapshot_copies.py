"""`jitckpt run --snapshot-copies`: a host is lost with its disk, and its part of a snapshot is on another."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_job import HostsJob
from launcher import Launcher
from namespaces import Namespaces
from snapshot_job import in_memory, undisturbed_training
from taken_number import TAKE

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


@pytest.fixture
def large_disks(launcher: Launcher) -> Iterator[Path]:
    """Give where two hosts of two ranks have their directories, with each other's copies."""
    with in_memory(launcher.directory / "disks", "8g") as folder:
        yield folder


def test_first_one_host_is_lost_and_then_the_other(
    launcher: Launcher, four_hosts: Namespaces, large_disks: Path, tmp_path: Path
) -> None:
    """Each with its disk, and two ranks. Between, what both have gone back to is copied again.

    The second is the one that leads, and has the store at which they meet: of two hosts it has to come again
    at the same address.
    """
    disks = large_disks
    (alone := tmp_path / "alone").mkdir()
    undisturbed = undisturbed_training(alone, ranks=4)
    job = HostsJob(launcher, four_hosts, disks, *COPIES, ranks=2)
    job.snapshot()
    job.wait_for("snapshot_copied")
    job.lose_host(1)
    shutil.rmtree(disks / "1")
    job.start_host(1, on=2)
    job.wait_for("gone_back")
    job.wait_for("snapshot_copied", 2)
    job.lose_host(0)
    shutil.rmtree(disks / "0")
    job.start_host(0)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed, said
    assert re.search(r"this host's part of the snapshot after step 8 has come from host 0", said), said
    assert re.search(r"this host's part of the snapshot after step 8 has come from host 1", said), said
    assert job.events("gone_back")[0]["step"] == 8


def test_a_host_that_is_lost_with_half_a_copy_has_all_go_back_to_the_one_before(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    job = HostsJob(launcher, four_hosts, disks, *COPIES)
    job.snapshot()
    job.wait_for("snapshot_copied")
    with four_hosts.slowed(1, 8_000_000):
        job.go_to(13)
        job.wait_for("snapshot", 2)
        coming = disks / "0" / "copies-of-snapshots" / "host-1"
        launcher.wait_until(lambda: list(coming.glob("unfinished-*")) != [])
        job.lose_host(1)
    assert len(job.events("snapshot_copied")) == 1
    shutil.rmtree(disks / "1")
    job.start_host(1, on=2)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert [event["step"] for event in job.events("gone_back")] == [8]


def test_the_leader_is_lost_with_half_a_copy_and_then_a_rank_is_killed(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """What the host that is left has of a newer snapshot, and nobody goes back to, is of no use later."""
    job = HostsJob(launcher, four_hosts, disks, *COPIES)
    job.snapshot()
    job.wait_for("snapshot_copied")
    with four_hosts.slowed(0, 8_000_000):
        job.go_to(13)
        job.wait_for("snapshot", 2)
        coming = disks / "1" / "copies-of-snapshots" / "host-0"
        launcher.wait_until(lambda: list(coming.glob("unfinished-*")) != [])
        job.lose_host(0)
    shutil.rmtree(disks / "0")
    job.start_host(0)
    job.process = job.agents[0]
    assert job.wait_for("gone_back")["step"] == 8
    job.wait_for("snapshot_copied")
    job.go_to(job.wait_for("snapshot_wanted")["step"] + 1)
    newest = job.wait_for("snapshot")["step"]
    os.kill(script_of(four_hosts.processes(1)), signal.SIGKILL)
    assert job.wait_for("gone_back", 2)["step"] == newest
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said


def script_of(processes: list[int]) -> int:
    """Return which of these processes is a rank."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes}
    (rank,) = (pid for pid, words in commands.items() if words[1:2] == [b"-u"] and len(words) == 4)
    return rank


def test_a_host_without_room_for_a_copy_is_named_and_all_goes_on(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """Two of its own snapshots fit, of about 350 MB each."""
    with in_memory(disks / "1", "850m"):
        job = HostsJob(launcher, four_hosts, disks, *COPIES)
        job.snapshot()
        lacks = job.wait_for("snapshot_not_copied")
        assert "of host 0 (10.79.0.1): host 1 (10.79.0.2): there is no room for" in lacks["text"]
        job.go_to(13)
        assert job.wait_for("snapshot", 2)["step"] > 8
        said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert said.count("there is no room for") == 1


def test_where_a_number_is_anothers_the_host_begins_again_in_a_pid_namespace(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    job = HostsJob(launcher, four_hosts, disks, *COPIES)
    job.snapshot()
    job.wait_for("snapshot_copied")
    job.lose_host(1)
    shutil.rmtree(disks / "1")
    (core, *_) = (disks / "0" / "copies-of-snapshots" / "host-1").glob("snapshot-*/rank-1/core-*.img")
    number = re.sub(r"\D", "", core.name)
    with subprocess.Popen([sys.executable, "-c", TAKE, number], stdin=-1, stdout=-1, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline().strip() == number
        job.start_host(1)
        said = job.finish_all()
        stranger.communicate()
    assert "others' here: this host begins again" in said
    assert "it goes on in a PID namespace" in said
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert job.events("gone_back")[-1]["step"] == 8
