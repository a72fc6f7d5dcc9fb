"""`jitckpt run --health-check`: a host that is not well has no part in the next start."""

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpt import RUN, TRAINING, digests
from launcher import JITCKPT, JITCKPT_RUN, Launcher, until_told
from namespaces import Namespaces, namespaces
from programs_of_tests import text_of
from test_hosts import PAUSING, Job, await_line

MEET = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.79.0.1:29400"]
OPTIONS = ["--nproc-per-node", "1", "--device", "softgpu", "--warm-spares", "0", "--warm-start"]

# Runs the training; in the first start rank 1's host falls ill before its rank dies.
FALLS_ILL = text_of("health_falls_ill")
FAULT = ["--fault", "rank=1 step=3 phase=backward kind=kill"]
CHECK = ["--health-check", "test ! -e ill || { echo the GPU smells; exit 7; }"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(3) as found:
        yield found


def test_one_that_stands_by_takes_the_place_of_a_host_that_is_not_well(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    script = launcher.script(FALLS_ILL)

    def start(host: int, *options: str) -> "subprocess.Popen[str]":
        run = ["env", "OMP_NUM_THREADS=1", *JITCKPT, "run", "--nnodes", "2", *MEET, *OPTIONS, *FAULT]
        run += ["--report-host", f'echo "host {host}, $3 $1: $2" >> reported']
        return launcher.start(*hosts.on(host), *run, *options, script, *TRAINING)

    first = start(0)
    ill = start(1, *CHECK)
    launcher.wait_until((launcher.directory / "ill").exists)
    third = start(2)
    told = until_told(ill, "the job goes on without this host: ")
    assert "ended with status 7: the GPU smells." in told
    told += until_told(ill, "this host is not taken: ")
    ends = [launcher.finish(agent) for agent in (first, third)]
    assert [end.status for end in ends] == [0, 0], told + ends[0].err + ends[1].err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    # It has reported itself, once, and nobody else has.
    reported = (launcher.directory / "reported").read_text()
    assert (
        reported
        == f"host 1, unfit {socket.gethostname()}: `{CHECK[1]}` ended with status 7: the GPU smells\n"
    )
    # It still waits to be well, and is ended there.
    ill.send_signal(signal.SIGTERM)
    assert launcher.finish(ill).status == 1


def test_one_that_falls_ill_while_it_stands_by_is_taken_when_its_check_passes(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    job = Job(launcher, hosts)
    command = [launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    third = job.start(2, *CHECK, *command)
    until_told(third, "this host stands by")
    (launcher.directory / "ill").touch()
    job.kill(1)
    told = until_told(third, "this host is not taken: ")
    assert "the job goes on without this host: " in told
    (launcher.directory / "go").touch()
    (launcher.directory / "ill").unlink()
    ends = [launcher.finish(agent) for agent in (agents[0], third)]
    assert [end.status for end in ends] == [0, 0], told + ends[0].err + ends[1].err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    assert "this host's health check passes" in ends[1].err


def test_a_host_whose_device_is_suspect_is_reported_while_the_job_goes_on(launcher: Launcher) -> None:
    script = launcher.script(
        """
        from fake_worker import *
        register()
        if RESTART < 2 and RANK == 1:
            wait_for(f"there{RESTART}")
            die()
        if RESTART < 2:
            open(f"there{RESTART}", "w")
            save(7 + RESTART)
        """
    )
    options = ["--nproc-per-node", "2", "--device", "softgpu", "--checkpoint-dir", "ckpt"]
    report = ["--report-host", 'echo "$3 $1: $2" >> reported; echo no such node; exit 1']
    ended = launcher.run(*JITCKPT_RUN, *options, *report, "--max-restarts", "3", script)
    assert ended.status == 0, ended.err
    reported = (launcher.directory / "reported").read_text()
    assert reported == f"suspect {socket.gethostname()}: rank 1 has failed twice on device 1\n"
    assert "could not be reported: " in ended.err
    assert "no such node" in ended.err


def test_a_host_alone_waits_until_it_is_well(launcher: Launcher, undisturbed: list[str]) -> None:
    agent = launcher.start(*RUN, *FAULT, *CHECK, launcher.script(FALLS_ILL), *TRAINING)
    told = until_told(agent, "this host is not taken: ")
    assert Path(launcher.directory / "ill").exists()
    (launcher.directory / "ill").unlink()
    result = launcher.finish(agent)
    assert result.status == 0, told + result.err
    assert digests(result.out) == undisturbed
    assert "this host's health check passes" in result.err
