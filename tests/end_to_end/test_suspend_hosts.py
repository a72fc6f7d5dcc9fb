"""A job on two hosts is suspended as a whole, and resumed on the same hosts or on others."""

from pathlib import Path

from hosts_job import SuspendedJob
from launcher import Launcher
from namespaces import Namespaces

from jitckpt.system import network_lock

NEWCOMERS = (2, 3)  # hosts that have no part in the job at first


def test_a_job_goes_on_on_other_hosts_from_a_shared_directory(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """They have other addresses and none of its processes."""
    locks = network_lock.tables()
    job = SuspendedJob(launcher, four_hosts, disks, shared=True)
    suspended = job.suspend(after=7)
    assert suspended.status == 0, suspended
    assert "It is suspended once all ranks have ended step 10." in suspended.out
    assert "job is suspended after step 10" in suspended.out
    said = job.ended()
    assert launcher.survivors() == []
    assert "is suspended after step 10: `jitckpt resume" in said
    assert job.left() == [["host-0", "host-1"]] * 2
    job.resume("--master-addr", "10.79.0.3", on=NEWCOMERS)
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert len(job.events("suspended")) == len(job.events("gone_back")) == 1
    assert (job.snapshots(), job.left()) == ([[], []], [[], []])
    launcher.wait_until(lambda: network_lock.tables() <= locks)


def test_a_job_migrates_to_hosts_that_wait_for_it(
    launcher: Launcher, four_hosts: Namespaces, disks: Path, undisturbed_job: list[str]
) -> None:
    """At first nobody does, and it stays."""
    job = SuspendedJob(launcher, four_hosts, disks, shared=True)
    job.go_to(7)
    job.wait_for_step(7)
    alone = launcher.finish(job.ask(0, "migrate", str(disks / "0"), "--within", "1"))
    assert alone.status == 1
    assert "The job runs on: nobody waits for the part of host 0, 1." in alone.out
    before = job.agents
    job.agents = {}
    job.resume("--wait", "--master-addr", "10.79.0.3", on=NEWCOMERS)
    waiting, job.agents = job.agents, before
    launcher.wait_until(lambda: len(list((disks / "0").glob("waiting-*.json"))) == 2)
    assert job.suspend("migrate", str(disks / "0"), after=7).status == 0
    job.ended()
    job.agents = waiting
    said = job.finish_all()
    assert [*job.finals, *job.logs] == undisturbed_job, said
    assert list((disks / "0").glob("waiting-*.json")) == []
