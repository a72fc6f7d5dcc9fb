"""Ranks of a host leave it for one that stands by, and the move itself fails."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import Launcher
from namespaces import Namespaces, kill, namespaces
from programs_of_tests import text_of
from test_standby import job, moves, undisturbed

from jitckpt.events import read_events
from jitckpt.rehearsal.runs import lasting_shared_memory

__all__ = ["undisturbed"]

LEADER, OLD, STANDBY = 0, 1, 2
FAULT, OF_FIRST = "rank=3 step=8", "rank=0 step=8"
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
    (launcher.directory / "steps").unlink(missing_ok=True)
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


def servers_of(hosts: Namespaces, host: int, rank: int) -> list[int]:
    """Return the device servers of a rank there: processes that may be ending."""
    found = []
    for pid in hosts.processes(host):
        with contextlib.suppress(OSError):
            is_server = b"jitckpt-proxy-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_server and b"RANK=%d" % rank in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


@pytest.mark.parametrize(("fault", "other"), [(FAULT, 0), (OF_FIRST, 2)])
def test_another_rank_that_fails_meanwhile_is_recovered_from_too(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], fault: str, other: int
) -> None:
    """Its server dies, on the host whose ranks stay, as the other one's ranks are dumped."""
    (launcher.directory / "steps").unlink(missing_ok=True)
    seen = launcher.directory / "seen"
    program = acting(launcher, "dump", f"touch {seen}; sleep 3")
    started = job(launcher, hosts, [fault], 1, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until(seen.exists)
    servers = servers_of(hosts, other // 2, other)
    for one in servers:
        os.kill(one, signal.SIGKILL)
    assert servers
    launcher.wait_until(lambda: moves(launcher) != [])
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert len(finals(ended[STANDBY].out)) == 2, told
    events = read_events(launcher.directory / "ck0")[0]
    (moved,) = [one for one in events if one["event"] == "ranks_moved"]
    killed = {one["pid"] for one in events if one["event"] == "server_ended" and "Killed" in one["how"]}
    assert other or killed & set(servers), "only what ends on the first host stands in the log"
    assert moved["ranks"] == ([2, 3] if other == 0 else [0, 1])
    steps = (launcher.directory / "steps").read_text().split()
    assert len(steps) == len(set(steps)), "a rank was there twice"


# On the host that stands by this rank's device is lost, too, whatever server it gets.
BROKEN_THERE = text_of("failing_moves_broken_there")


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
@pytest.mark.parametrize(("fault", "left"), [(FAULT, OLD), (OF_FIRST, LEADER)])
def test_whichever_host_dies_in_the_move_nothing_is_left_and_nobody_hangs(
    launcher: Launcher, hosts: Namespaces, fault: str, left: int, lost: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    seen = launcher.directory / "seen"
    program = acting(launcher, "restore", f"touch {seen}; sleep 3")
    started = job(launcher, hosts, [fault], 1, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until(seen.exists)
    kill(hosts, lost)
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    err = "".join(one.err for host, one in enumerate(ended) if host != lost)
    errors = [line for line in err.splitlines() if "Traceback" in line and not line.startswith("[rank")]
    # Threads of the script lose the store, where that is lost.
    assert len(errors) == (err.count("Exception in thread ") if lost == LEADER else 0), told
    assert "Exception in thread jitckpt" not in err, told
    if lost == STANDBY:  # the script gets its error, on its own host
        assert "the ranks of this host were not moved to another one" in ended[left].err, told
        assert "CUDA error" in ended[left].err, told
    assert finals("".join(one.out for one in ended)) == [], told
    assert launcher.survivors() == [], told
    assert lasting_shared_memory(before) == []


def test_where_one_that_stands_by_can_not_make_the_first_hosts_ranks_again_another_does(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    program = acting(launcher, "restore", "exit 3", once=False)
    started = job(launcher, hosts, [OF_FIRST], 2, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until(lambda: moves(launcher) != [])
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 4, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert "so another is asked: The host that stands by says: criu can't restore" in ended[0].err
    assert sorted(len(finals(one.out)) for one in ended[STANDBY:]) == [0, 2], told


@pytest.mark.parametrize("lost", [LEADER, STANDBY])
def test_nothing_is_left_and_nobody_hangs_where_a_host_dies_after_the_first_one_was_left(
    launcher: Launcher, hosts: Namespaces, lost: int
) -> None:
    """The launcher that stays without ranks is needed, and so is the host that has them."""
    before = set(os.listdir("/dev/shm"))
    started = job(launcher, hosts, [OF_FIRST], 1, *NO_RESTART, "--host-timeout", "5")
    launcher.wait_until(lambda: moves(launcher) != [])
    kill(hosts, lost)
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for host, one in enumerate(ended) if host != lost] == [1, 1], told
    with_what = "the lead and the ranks' store" if lost == LEADER else "ranks 0, 1"
    speaks = OLD if lost == LEADER else LEADER
    assert f"host {lost} (10.79.0.{lost + 1}) with {with_what} is lost" in ended[speaks].err, told
    assert launcher.survivors() == [], told
    assert lasting_shared_memory(before) == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_ranks_start_again_on_the_first_host_where_they_fail_on_the_one_to_which_they_had_gone(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], is_lost: bool
) -> None:
    """Its launcher is still there, and the device may do for a start; if not, that is found there."""
    faults = [OF_FIRST] if is_lost else [OF_FIRST, "rank=1 step=11 kind=kill"]
    restarts = "1" if is_lost else "2"  # the first host does not know that it was killed
    started = job(launcher, hosts, faults, 1, "--max-restarts", restarts, "--host-timeout", "5")
    launcher.wait_until(lambda: moves(launcher) != [])
    if is_lost:
        kill(hosts, STANDBY)
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended[:STANDBY]] == [0, 0], told
    assert ended[STANDBY].status != 0, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert [len(finals(one.out)) for one in ended] == [2, 2, 0], told
