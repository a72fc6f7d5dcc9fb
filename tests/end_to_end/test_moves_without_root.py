"""Who is not root, but has the three capabilities that the guide names, has processes made anew, too."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import Launcher
from namespaces import Namespaces
from test_broken_device import LOST, SCRIPT, leaves_nothing, of, wrapped
from test_standby import EARLIER, hosts, undisturbed
from test_standby import job as job_on_hosts
from test_surroundings import USER, without_rights

from jitckpt.events import read_events
from jitckpt.system import network_lock
from jitckpt.wire import environment

CAPABILITIES = "+checkpoint_restore,+setpcap,+net_admin"
__all__ = ["hosts", "undisturbed"]  # fixtures
RIGHTS = ["--inh-caps", CAPABILITIES, "--ambient-caps", CAPABILITIES]


@pytest.fixture
def jitckpt(launcher: Launcher) -> Iterator[list[str]]:
    """What that user says for `jitckpt`, in a folder that is the user's."""
    if os.geteuid() != 0:
        pytest.skip("only root can have another user's rights")
    criu_of_this_machine()
    launcher.directory = Path(tempfile.mkdtemp(prefix="jitckpt-without-root-", dir="/tmp"))
    os.chown(launcher.directory, USER, USER)
    if not (command := without_rights(launcher.directory, *RIGHTS)):
        shutil.rmtree(launcher.directory)
        pytest.skip("another user can't read this installation, or the system's Python is of another version")
    yield command
    shutil.rmtree(launcher.directory)


def job(jitckpt: list[str], *words: str, program: str) -> list[str]:
    """Return the command of a job of two ranks, with a device more than it needs."""
    options = ["--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent", "--max-restarts", "0"]
    variables = ["SOFTGPU_DEVICES=3", f"{environment.CRIU.name}={program}"]
    return ["env", *variables, *jitckpt, "run", "--standalone", *options, *words]


def test_a_rank_is_made_anew_and_goes_on_in_the_same_minibatch(
    launcher: Launcher, jitckpt: list[str]
) -> None:
    """With a loader, pinned memory and threads that use the job's store."""
    script, program = launcher.script(SCRIPT), str(criu_of_this_machine().program)
    undisturbed = launcher.run(*job(jitckpt, script, program=program))
    assert undisturbed.status == 0, undisturbed.err
    options = ["--broken-device", "move", "--fault", LOST, "--checkpoint-dir", "ck"]
    result = launcher.run(*job(jitckpt, *options, script, program=program))
    assert result.status == 0, result.err
    assert finals(result.out) == finals(undisturbed.out)
    (moved,) = of(read_events(launcher.directory / "ck")[0], "worker_moved")
    assert moved["rank"] == 1
    assert len(moved["pids"]) >= 2
    assert launcher.survivors() == []


def test_nothing_is_left_of_a_launcher_that_is_killed_while_it_moves_a_worker(
    launcher: Launcher, jitckpt: list[str]
) -> None:
    """No images in memory, either, which the user may not mount."""
    before, locks = set(os.listdir("/dev/shm")), network_lock.tables()
    seen = launcher.directory / "seen"
    slow = wrapped(launcher, str(criu_of_this_machine().program), "restore", f"touch {seen}; sleep 1")
    os.chmod(slow, 0o755)
    options = ["--broken-device", "move", "--fault", LOST, launcher.script(SCRIPT)]
    process = launcher.start(*job(jitckpt, *options, program=slow))
    leaves_nothing(launcher, process, seen, before, locks)


def test_both_ranks_of_a_host_go_on_on_one_that_stands_by(
    launcher: Launcher, jitckpt: list[str], hosts: Namespaces, undisturbed: list[str]
) -> None:
    (launcher.directory / "go").touch()
    (launcher.directory / "steps").unlink(missing_ok=True)  # which is root's
    waits = ["--move-wait", "60", "--max-restarts", "0"]  # where the host that stands by is late
    started = job_on_hosts(launcher, hosts, ["rank=3 step=8"], 1, *waits, jitckpt=jitckpt)
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert sorted(line for one in ended for line in finals(one.out)) == undisturbed, told
    assert len(finals(ended[2].out)) == 2, told
    (moved,) = of(read_events(launcher.directory / "ck0")[0], "ranks_moved")
    assert (moved["host"], moved["ranks"]) == (1, [2, 3])


def test_ranks_stay_where_their_clock_would_jump(
    launcher: Launcher, jitckpt: list[str], hosts: Namespaces
) -> None:
    """Of the other host's clock only root can make them a namespace."""
    (launcher.directory / "go").touch()
    clock = ["--time", "--monotonic", str(EARLIER), "--boottime", str(EARLIER)]
    left = ["unshare", *clock, "--fork", "--kill-child"]
    words = ["--move-wait", "20", "--max-restarts", "0"]
    started = job_on_hosts(launcher, hosts, ["rank=3 step=8"], 1, *words, jitckpt=jitckpt, left=left)
    ended = [launcher.finish(one) for one in started]
    assert [one.status for one in ended] == [1, 1, 0]
    for host in (1, 2):
        assert "the clock of the one that they leave. That needs root here." in ended[host].err
    assert "CUDA error: unknown error" in ended[1].err, ended[1].err
