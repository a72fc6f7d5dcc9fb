"""Ranks of a host leave it for one that stands by, and the move itself fails."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from launcher import Launcher
from namespaces import Namespaces, kill, namespaces
from test_standby import finals, job, undisturbed

from jitckpt.events import read_events
from jitckpt.rehearsal.runs import lasting_shared_memory

__all__ = ["undisturbed"]

LEADER, OLD, STANDBY = 0, 1, 2
FAULT = "rank=3 step=8"
NO_RESTART = ("--max-restarts", "0")


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


def acting(launcher: Launcher, what: str, act: str, *, once: bool = True) -> str:
    """Return a CRIU that acts where it is asked for that by a host that makes or sends ranks.

    once: else each time on the first host on which it does.
    """
    armed, acted = launcher.directory / "armed", launcher.directory / "acted"
    here = "readlink /proc/self/ns/net"
    elsewhere = f'[ "$({here})" != "$(cat {acted} 2> /dev/null || {here} | tee {acted})" ]'
    passes = f"! mkdir {acted} 2> /dev/null" if once else elsewhere
    text = f"[ $1 != {what} ] || [ ! -e {armed} ] || {passes} || {{ {act}; }}"
    program = criu_of_this_machine().program
    path = Path(launcher.script(f'#!/bin/sh\n{text}\nexec {program} "$@"\n', "criu"))
    path.chmod(0o700)
    return str(path)


def arm(launcher: Launcher) -> None:
    """From here on it acts: all hosts have tried CRIU, as they do at their start."""

    def is_under_way() -> bool:
        folder = launcher.directory / "ck0"
        return folder.exists() and any(one["event"] == "proxy_connected" for one in read_events(folder)[0])

    launcher.wait_until(is_under_way)
    (launcher.directory / "armed").touch()


def test_where_one_that_stands_by_can_not_make_them_again_another_does(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """The steps are each rank's but once: at no time are there two of it."""
    (launcher.directory / "steps").unlink()
    program = acting(launcher, "restore", "exit 3", once=False)
    started = job(launcher, hosts, [FAULT], 2, *NO_RESTART, program=program)
    arm(launcher)
    old = launcher.finish(started[OLD])
    (launcher.directory / "go").touch()
    ended = [launcher.finish(started[0]), old, *map(launcher.finish, started[STANDBY:])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 4, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert "so another is asked: The host that stands by says: criu can't restore" in old.err
    assert sorted(len(finals(one.out)) for one in ended[STANDBY:]) == [0, 2], told
    steps = (launcher.directory / "steps").read_text().split()
    assert len(steps) == len(set(steps)), "a rank was there twice"


def test_another_rank_that_fails_meanwhile_is_recovered_from_too(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """Its server dies, on the host that stays, as the other one's ranks are dumped."""
    (launcher.directory / "steps").unlink()
    seen = launcher.directory / "seen"
    program = acting(launcher, "dump", f"touch {seen}; sleep 3")
    started = job(launcher, hosts, [FAULT], 1, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until(seen.exists)
    servers = [one for one in read_events(launcher.directory / "ck0")[0] if one["event"] == "server_started"]
    os.kill(next(one["pid"] for one in reversed(servers) if one["rank"] == 0), signal.SIGKILL)
    old = launcher.finish(started[OLD])
    (launcher.directory / "go").touch()
    ended = [launcher.finish(started[LEADER]), old, launcher.finish(started[STANDBY])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert len(finals(ended[STANDBY].out)) == 2, told
    events = read_events(launcher.directory / "ck0")[0]
    (moved,) = [one for one in events if one["event"] == "ranks_moved"]
    killed = [one for one in events if one["event"] == "server_ended" and "Killed" in one["how"]]
    assert 0 in {one["rank"] for one in killed}, killed
    assert moved["ranks"] == [2, 3]
    steps = (launcher.directory / "steps").read_text().split()
    assert len(steps) == len(set(steps)), "a rank was there twice"


# On the host that stands by this rank's device is lost, too, whatever server it gets.
BROKEN_THERE = """
import sys
from jitckpt import cli
from jitckpt.agent import standby
from jitckpt.faults.injection import OF_A_BROKEN_DEVICE

of_server = standby._Adopted._of_server

def broken(self, rank):
    return {**of_server(self, rank), **(OF_A_BROKEN_DEVICE if rank == 3 else {})}

standby._Adopted._of_server = broken
sys.exit(cli.main())
"""


def test_a_call_that_fails_on_the_other_host_as_before_is_the_programs_error(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """It is not moved once more, and nobody waits for it."""
    before = set(os.listdir("/dev/shm"))
    standby = [sys.executable, launcher.script(BROKEN_THERE, "broken_there.py")]
    started = job(launcher, hosts, [FAULT], 2, *NO_RESTART, standby=standby)
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert ended[OLD].status == 0, told
    assert ended[LEADER].status == 1, told
    assert sorted(one.status for one in ended[STANDBY:]) == [0, 1], told  # one was not needed
    events = read_events(launcher.directory / "ck0")[0]
    assert [one["ranks"] for one in events if one["event"] == "ranks_moved"] == [[2, 3]]
    assert any("CUDA error" in one.err for one in ended[STANDBY:]), told
    assert finals("".join(one.out for one in ended)) == [], told
    assert launcher.survivors() == [], told
    assert lasting_shared_memory(before) == []


@pytest.mark.parametrize("lost", [LEADER, OLD, STANDBY])
def test_whichever_host_dies_in_the_move_nothing_is_left_and_nobody_hangs(
    launcher: Launcher, hosts: Namespaces, lost: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    seen = launcher.directory / "seen"
    program = acting(launcher, "restore", f"touch {seen}; sleep 3")
    started = job(launcher, hosts, [FAULT], 1, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until(seen.exists)
    kill(hosts, lost)
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    lines = "".join(one.err for host, one in enumerate(ended) if host != lost).splitlines()
    assert not [line for line in lines if "Traceback" in line and not line.startswith("[rank")], told
    if lost == STANDBY:  # the script gets its error, on its own host
        assert "the ranks of this host were not moved to another one" in ended[OLD].err, told
        assert "CUDA error" in ended[OLD].err, told
    assert finals("".join(one.out for one in ended)) == [], told
    assert launcher.survivors() == [], told
    assert lasting_shared_memory(before) == []
