"""Hosts that stand by at a store of the hosts' own: they wait for those that have the job's state."""

import sys
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest
from gpt import TRAINING, digests
from launcher import Launcher, until_told
from namespaces import Namespaces, kill, namespaces
from programs_of_tests import text_of
from test_hosts import PAUSING, STORE, Job, await_line

# `jitckpt` on a host that is slow: it has left the last meeting, and comes to the next one when those that
# stand by have long seen that there is one.
SLOW = text_of("hosts_that_stand_by_slow")
# A store that is on none of the job's hosts, and `jitckpt` that waits less long for the dead.
KEEPS = text_of("hosts_that_stand_by_keeps")
IMPATIENT = text_of("hosts_that_stand_by_impatient")
QUICK = ["--host-timeout", "5", "--rdzv-conf", "keep_alive_interval=1"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def has_warm_process(agent: psutil.Process) -> bool:
    """Return whether a process of the agent's has loaded torch, and waits to be a rank."""
    return any(
        any("jitckpt.worker.spare" in word for word in one.cmdline())
        and any("libtorch_cpu" in mapped.path for mapped in one.memory_maps())
        for one in agent.children(recursive=True)
    )


def test_two_that_stand_by_wait_for_the_one_that_is_left(job: Job, undisturbed: list[str]) -> None:
    """They are two, as many as the job needs, and come to the next meeting before it."""
    command = [*QUICK, job.launcher.script(PAUSING), *TRAINING]
    slow = [sys.executable, job.launcher.script(SLOW, "slow.py")]
    agents = [job.start(0, *command, jitckpt=slow), job.start(1, *command)]
    await_line(agents[0], "pauses\n")
    spares = [job.start(host, *command) for host in (2, 3)]
    told = [until_told(spare, "this host stands by: it takes the place") for spare in spares]
    for spare in spares:
        job.launcher.wait_until(partial(has_warm_process, psutil.Process(spare.pid)))
    job.kill(1)
    (job.launcher.directory / "go").touch()
    agents[1].communicate()
    ends = [job.launcher.finish(agent) for agent in (agents[0], *spares)]
    said = "".join(told) + "\n=====\n".join(end.err for end in ends)
    assert [end.status for end in ends] == [0, 0, 0], said
    assert digests("".join(end.out for end in ends)) == undisturbed
    assert said.count("this host stood by and was not needed") == 1
    assert "The job succeeded after 1 restart." in said


def test_one_that_came_first_stands_by_and_ends_when_the_job_is_lost_with_all_its_hosts(job: Job) -> None:
    """The store is still there, and nobody else; whoever starts the job again makes a new one."""
    store = job.launcher.start(
        *job.hosts.on(0), sys.executable, job.launcher.script(KEEPS, "store.py"), STORE
    )
    await_line(store, "there\n")
    command = [*QUICK, job.launcher.script(PAUSING), *TRAINING]
    impatient = [sys.executable, job.launcher.script(IMPATIENT, "impatient.py")]
    spare = job.start(3, "--standby", *command, jitckpt=impatient)
    time.sleep(10)  # by then it would have a part in the first start
    agents = [job.start(host, *command) for host in (1, 2)]
    await_line(agents[0], "pauses\n")
    until_told(spare, "this host stands by: it takes the place")
    kill(job.hosts, 1, 2)
    end = job.launcher.finish(spare)
    assert end.status == 76, end.err
    assert "All hosts that had the job's state are gone" in end.err
    assert store.poll() is None
