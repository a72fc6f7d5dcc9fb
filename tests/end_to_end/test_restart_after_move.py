"""Ranks have gone on on a host that stood by; what fails after that starts them again, there as elsewhere."""

import os
import signal
from collections.abc import Sequence

import psutil
import pytest
from final_lines import finals
from launcher import Launcher, Result
from namespaces import Namespaces, kill, namespaces
from test_standby import (
    LAST,
    MEET,
    TRAINING,
    WAITS,
    Started,
    hosts,
    job,
    of_one_host,
    switch_off,
    undisturbed,
)

from jitckpt.events import Event, read_events

__all__ = ["hosts", "undisturbed"]

FAULT = "rank=3 step=8"
# After the move rank 3 ends with an exception: once, or each time.
RAISES = "        raise RuntimeError('not this time')\n"
ALWAYS = f"    if rank == 3:\n{RAISES}"
ONCE = f"    if rank == 3 and not os.path.exists('raised'):\n        open('raised', 'w').close()\n{RAISES}"


def raising(when: str) -> str:
    ends = TRAINING.replace("threading.Thread(", "threading.Thread(daemon=True, ")  # with its main thread
    return ends.replace(WAITS + LAST, WAITS + when + LAST)


def moved(launcher: Launcher, hosts: Namespaces, started: Sequence[Started]) -> Result:
    """Wait until the ranks of host 1 are on host 2, and host 1 is switched off."""
    old = launcher.finish(started[1])
    assert old.status == 0, old.err
    switch_off(hosts, 1)
    return old


def worker(hosts: Namespaces, host: int, rank: int) -> int:
    """Return the process of that rank, which runs on that host."""

    def has_rank(process: psutil.Process) -> bool:
        return process.environ().get("RANK") == str(rank) and "script.py" in " ".join(process.cmdline())

    found = [psutil.Process(pid) for pid in hosts.processes(host)]
    (only,) = [one.pid for one in found if has_rank(one) and not has_rank(one.parent() or one)]
    return only


def ends(
    launcher: Launcher, started: Sequence[Started], old: Result, undisturbed: list[str]
) -> tuple[list[Result], str]:
    """Let the job come to its end, which is that of an undisturbed one; return what was said."""
    ended = [launcher.finish(started[0]), old, *map(launcher.finish, started[2:])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * len(ended), told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert [len(finals(one.out)) for one in ended[:3]] == [2, 0, 2], told
    return ended, told


def events(launcher: Launcher) -> list[Event]:
    folder = launcher.directory / "ck0"
    return read_events(folder)[0] if (folder / "events.jsonl").exists() else []


@pytest.mark.parametrize(("host", "rank"), [(2, 3), (0, 1)])
def test_a_killed_worker_starts_all_ranks_again(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], host: int, rank: int
) -> None:
    started = job(launcher, hosts, [FAULT], 1)
    old = moved(launcher, hosts, started)
    os.kill(worker(hosts, host, rank), signal.SIGKILL)
    (launcher.directory / "go").touch()
    ended, told = ends(launcher, started, old, undisturbed)
    assert "The job succeeded after 1 restart." in ended[0].err, told
    assert [one["restart"] for one in events(launcher) if one["event"] == "restart"] == [1], told


def test_an_exception_starts_all_ranks_again(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    started = job(launcher, hosts, [FAULT], 1, "--max-restarts", "1", script=raising(ONCE))
    old = moved(launcher, hosts, started)
    (launcher.directory / "go").touch()
    ended, told = ends(launcher, started, old, undisturbed)
    assert "RuntimeError: not this time" in ended[2].err, told
    assert "The job succeeded after 1 restart." in ended[0].err, told


def test_once_no_restart_is_left_the_job_ends_on_both_hosts(launcher: Launcher, hosts: Namespaces) -> None:
    started = job(launcher, hosts, [FAULT], 1, "--max-restarts", "1", script=raising(ALWAYS))
    moved(launcher, hosts, started)
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in (started[0], started[2])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [1, 1], told
    assert ended[1].err.count("RuntimeError: not this time") >= 2, told
    assert "after 1 restart" in ended[0].err, told
    assert launcher.survivors() == [], told


def test_those_that_are_left_meet_at_the_store_of_the_host_that_has_taken_a_place(launcher: Launcher) -> None:
    """The first host is lost, and with it the store at which all have met; another host is there for it."""
    three = of_one_host(launcher, 3)
    meet = ["--nnodes", "3", *MEET[2:], "--host-timeout", "5"]
    with namespaces(5) as hosts:
        started = job(launcher, hosts, ["rank=1 step=8"], 1, ranks=1, meet=meet, beyond=[3])
        launcher.wait_until(lambda: bool(events(launcher)))  # else the last one may have a part
        started += job(launcher, hosts, [], 0, ranks=1, meet=meet, begun=[], beyond=[4])
        moved(launcher, hosts, started)
        kill(hosts, 0)
        (launcher.directory / "go").touch()
        ended = [launcher.finish(one) for one in started]
        told = "\n=====\n".join(one.err for one in ended)
        assert [one.status for one in ended[1:]] == [0] * 4, told
        assert finals("".join(one.out for one in ended)) == three, told
        assert [len(finals(one.out)) for one in ended] == [0, 0, 1, 1, 1], told
        assert "The store is at 10.79.0.3:" in ended[2].err, told
