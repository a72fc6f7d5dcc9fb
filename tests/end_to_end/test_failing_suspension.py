"""A disk gets full, or a host dies, while a job on two hosts is written: it goes on, and has what it had."""

from pathlib import Path

from criu_here import criu_of_this_machine
from hosts_job import SuspendedJob
from launcher import Launcher
from namespaces import Namespaces
from snapshot_job import in_memory

SMALL = "900m"  # enough for two snapshots of a rank


def with_criu_that(does: str, launcher: Launcher) -> str:
    """Return a CRIU that does something else before each dump, once there is the file `armed`."""
    program = criu_of_this_machine().program
    text = f'#!/bin/bash\nif [ "$1" = dump ] && [ -e {launcher.directory}/armed ]; then\n{does}\nfi\n'
    script = Path(launcher.script(f'{text}exec {program} "$@"\n', "criu"))
    script.chmod(0o700)
    return str(script)


def test_a_disk_that_gets_full_leaves_the_older_snapshot_and_the_training(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """A host's part of the second one fills its disk; then nothing is begun. A rank dies, and all go back."""
    with in_memory(disks / "1", SMALL) as full:
        fills = with_criu_that(f"head -c 4G /dev/zero > {full}/rest", launcher)
        job = SuspendedJob(
            launcher,
            four_hosts,
            disks,
            "--fault",
            "rank=0 step=29 phase=forward kind=kill",
            held=("--snapshot-every", "0.01"),
            program=fills,
        )
        job.snapshot()
        (launcher.directory / "armed").touch()
        step = job.wait_for("snapshot_wanted", 2)["step"]
        job.go_to(step + 1)
        text = job.wait_for("snapshot_failed")["text"]
        assert "could not be put on the disk: " in text
        assert "No space left" in text
        assert "(host 1)" in text
        asked = job.suspend(after=step + 1)
        assert asked.status == 1
        assert "The job was not suspended: it needs" in asked.out
        assert "(host 1)" in asked.out
        assert (job.snapshots(), job.left()) == ([["snapshot-0000000008"]] * 2, [[], []])
        said = job.finish_all()
        assert [*job.finals, *job.logs] == undisturbed_job, said
        assert job.events("gone_back")[0]["step"] == 8


def test_a_host_that_dies_while_its_ranks_are_written_leaves_nothing_suspended(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """Who has asked hears why; the host comes again, and all go back to the snapshot before."""
    at_it = launcher.directory / "at-it"
    hangs = with_criu_that(f"touch {at_it}; exec sleep infinity", launcher)
    job = SuspendedJob(launcher, four_hosts, disks, held=("--snapshot-every", "0.01"), program=hangs)
    job.snapshot()
    (launcher.directory / "armed").touch()
    asked, _ = job.begin_suspending(after=9, by=0)
    launcher.wait_until(at_it.exists)
    job.lose_host(1)
    (launcher.directory / "armed").unlink()
    heard = launcher.finish(asked)
    assert heard.status == 1
    assert "The job was not suspended: " in heard.out
    assert job.left() == [[], []]
    job.start_host(1)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert job.events("gone_back")[0]["step"] == 8
