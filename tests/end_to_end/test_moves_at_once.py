"""The devices of several hosts are broken for good in the same minibatch: several moves in one recovery."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from criu_here import criu_of_this_machine
from final_lines import finals
from launcher import JITCKPT, LIMIT, Launcher, Result
from namespaces import Namespaces, kill, namespaces
from programs_of_tests import text_of
from test_failing_moves import arm, servers_of
from test_standby import (
    ITS_PID,
    MEET,
    STEP,
    TRAINING,
    Started,
    hosts,
    job,
    moves,
    of_one_host,
    pids,
    undisturbed,
)

from jitckpt.events import read_events
from jitckpt.rehearsal.runs import lasting_shared_memory

__all__ = ["hosts", "undisturbed"]

BOTH = ["rank=0 step=8", "rank=3 step=8"]
# With both hosts all devices go: no replica has the state any more.
IN_MEMORY = "--no-state-on-device"
NO_RESTART = ["--max-restarts", "0"]
STEPS = 14


def ended(
    launcher: Launcher, started: Sequence[Started], statuses: Sequence[int]
) -> tuple[list[Result], str]:
    """Let the job come to its end; return what all have said."""
    (launcher.directory / "go").touch()
    found = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in found)
    assert [one.status for one in found] == list(statuses), told
    return found, told


def moves_to(hosts: Namespaces, of: int = 0) -> int:
    """Return on which host that stood by the first rank of that one is."""
    (there,) = (host for host in (2, 3) if workers(hosts, host, 2 * of))
    return there


def workers(hosts: Namespaces, host: int, rank: int) -> list[int]:
    """Return the processes of that rank there, but for its servers."""
    found = []
    for pid in hosts.processes(host):
        with contextlib.suppress(OSError):
            is_script = b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_script and b"RANK=%d" % rank in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def made_each_step_once(launcher: Launcher, ranks: int) -> bool:
    """Whether each rank has made each step once, and all of them in one process."""
    steps, said = (launcher.directory / "steps").read_text().split(), pids(launcher)
    of_one_process = [len({pid for one, pid in said if one == rank}) == 1 for rank in range(ranks)]
    return len(steps) == len(set(steps)) == len(said) == ranks * STEPS and all(of_one_process)


# A device is broken if its rank fails twice. The first rank's failure has all others stopped, unless they
# fail meanwhile: where the agent is slow to hear of the first one, both are found in one recovery.
SLOW = text_of("moves_at_once_slow")


def both_at_once(launcher: Launcher) -> list[str]:
    """Return what `jitckpt` is on the hosts that have ranks."""
    return [sys.executable, launcher.script(SLOW, "slow.py")]


def in_one_recovery(launcher: Launcher) -> bool:
    """Whether all that have moved did so in the same one."""
    found = [one["event"] for one in read_events(launcher.directory / "ck0")[0]]
    moved = [number for number, event in enumerate(found) if event in ("ranks_moved", "worker_moved")]
    return len(moved) == 2 and "recovery_begun" not in found[moved[0] : moved[1]]


# What `later` dumps waits until the other's ranks are being made again, and is made again after `restore`.
OVERTAKEN = """#!/bin/sh
cd FOLDER || exit 1
if [ -e armed ] && [ "$1" = dump ] && [ "$(readlink /proc/self/ns/net)" = "NETWORK" ]; then
    while [ $(ls | grep -c restoring-) -lt 2 ]; do sleep 0.1; done
    touch dumped
elif [ -e armed ] && [ "$1" = restore ]; then
    [ ! -e dumped ] || while [ ! -e restore ]; do sleep 0.1; done
    touch restoring-$$
fi
exec PROGRAM "$@"
"""


def overtaken(launcher: Launcher, hosts: Namespaces, later: int) -> str:
    """Return a CRIU by which the other host's ranks are on a standby before those of `later`."""
    network = f"net:[{os.stat(f'/run/netns/{hosts.names[later]}').st_ino}]"
    program = str(criu_of_this_machine().program)
    text = OVERTAKEN.replace("FOLDER", str(launcher.directory)).replace("NETWORK", network)
    path = Path(launcher.script(text.replace("PROGRAM", program), "criu"))
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("faults", [BOTH, [f"rank={rank} step=8" for rank in range(4)]])
def test_two_hosts_are_left_in_the_same_minibatch(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], faults: list[str]
) -> None:
    """One of them is the first, whose launcher stays: the ranks of each are on a standby of their own."""
    before = set(os.listdir("/dev/shm"))
    (launcher.directory / "steps").unlink(missing_ok=True)
    script = TRAINING.replace(STEP, STEP + ITS_PID)
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(faults, 2, IN_MEMORY, *NO_RESTART, script=script)
    found, told = ended(launcher, started, [0] * 4)
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found] == [0, 0, 2, 2], told
    assert sorted(one["ranks"] for one in moves(launcher)) == [[0, 1], [2, 3]]
    assert made_each_step_once(launcher, 4)
    assert in_one_recovery(launcher)
    assert launcher.survivors() == []
    assert lasting_shared_memory(before) == []


@pytest.mark.parametrize("later", [0, 1])
def test_a_host_is_left_while_another_ones_ranks_are_on_their_way(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], later: int
) -> None:
    """What the host was told to which these go is old by then: who is where, and what hosts there are."""
    program = overtaken(launcher, hosts, later)
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 2, IN_MEMORY, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until((launcher.directory / "dumped").exists)
    if later == 0:
        assert started[1].wait(LIMIT) == 0
    else:
        launcher.wait_until(lambda: moves(launcher) != [])
    (launcher.directory / "restore").touch()
    found, told = ended(launcher, started, [0] * 4)
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found] == [0, 0, 2, 2], told
    assert sorted(one["ranks"] for one in moves(launcher)) == [[0, 1], [2, 3]]


def test_a_rank_takes_another_device_of_its_host_while_another_host_is_left(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """The first host has one more; the other one's ranks get their state from there."""
    (launcher.directory / "steps").unlink(missing_ok=True)
    script = TRAINING.replace(STEP, STEP + ITS_PID)
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 1, *NO_RESTART, script=script, devices=(3, 2))
    found, told = ended(launcher, started, [0] * 3)
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found] == [2, 0, 2], told
    events = read_events(launcher.directory / "ck0")[0]
    assert [one["rank"] for one in events if one["event"] == "worker_moved"] == [0]
    assert [one["ranks"] for one in moves(launcher)] == [[2, 3]]
    assert made_each_step_once(launcher, 4)
    assert in_one_recovery(launcher)


def test_two_hosts_beside_a_third_are_left_in_the_same_minibatch(launcher: Launcher) -> None:
    """Neither is the first, from which all get their state."""
    three = of_one_host(launcher, 3)
    (launcher.directory / "steps").unlink(missing_ok=True)
    meet = ["--nnodes", "3", *MEET[2:]]
    script = TRAINING.replace(STEP, STEP + ITS_PID)
    with namespaces(5) as hosts:
        begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
        faults = ["rank=1 step=8", "rank=2 step=8"]
        started = begin(faults, 2, *NO_RESTART, script=script, ranks=1, meet=meet, beyond=[4])
        found, told = ended(launcher, started, [0] * 5)
        assert finals("".join(one.out for one in found)) == three, told
        assert [len(finals(one.out)) for one in found] == [1, 0, 1, 1, 0], told
        assert sorted(one["ranks"] for one in moves(launcher)) == [[1], [2]]
        assert made_each_step_once(launcher, 3)
        assert in_one_recovery(launcher)


def test_where_one_host_stands_by_for_two_the_other_ranks_wait_for_one_more(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    words = [IN_MEMORY, *NO_RESTART, "--move-wait", "120"]
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 1, *words)
    launcher.wait_until(lambda: started[1].poll() is not None or moves(launcher) != [])  # one is left
    started += begin([], 1, *words, begun=[], first=3)
    found, told = ended(launcher, started, [0] * 4)
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found] == [0, 0, 2, 2], told
    assert sorted(one["ranks"] for one in moves(launcher)) == [[0, 1], [2, 3]]
    held = "no host that stands by can take this host's ranks now, so they are held: "
    assert sum(held in one.err for one in found) == 1, told


def test_where_no_other_host_comes_to_stand_by_that_is_said_and_nothing_is_left(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    before = set(os.listdir("/dev/shm"))
    words = [IN_MEMORY, *NO_RESTART, "--move-wait", "5"]
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 1, *words)
    (launcher.directory / "go").touch()
    found = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in found)
    assert len(moves(launcher)) <= 1  # the first host may not have heard of it before the end
    assert found[0].status == 1, told
    why = "the ranks of this host were not moved to another one: No host that stands by can be reached, or"
    assert sum(why in one.err for one in found) == 1, told
    assert finals("".join(one.out for one in found)) == [], told
    assert launcher.survivors() == [], told
    assert lasting_shared_memory(before) == []


def test_another_failure_comes_when_one_of_two_moves_is_over(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """A server dies on the host to which the first one's ranks have gone; the others are on their way."""
    program = overtaken(launcher, hosts, 1)
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 2, IN_MEMORY, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until(lambda: moves(launcher) != [])
    there = moves_to(hosts)
    launcher.wait_until(lambda: bool(servers_of(hosts, there, 0)))
    for one in servers_of(hosts, there, 0):
        os.kill(one, signal.SIGKILL)
    (launcher.directory / "restore").touch()
    found, told = ended(launcher, started, [0] * 4)
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found] == [0, 0, 2, 2], told


@pytest.mark.parametrize("of", [0, 1])
def test_a_standby_that_dies_while_another_move_is_on_its_way_leaves_nobody_waiting(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], of: int
) -> None:
    """Its ranks are lost, and the job ends; the other host's ranks, which are to come to a standby, too."""
    before = set(os.listdir("/dev/shm"))
    program = overtaken(launcher, hosts, 1 - of)
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 2, IN_MEMORY, *NO_RESTART, program=program)
    arm(launcher)
    launcher.wait_until((launcher.directory / "dumped").exists)
    if of == 0:
        launcher.wait_until(lambda: moves(launcher) != [])
    else:
        assert started[1].wait(LIMIT) == 0
    there = moves_to(hosts, of)
    kill(hosts, there)
    (launcher.directory / "restore").touch()
    (launcher.directory / "go").touch()
    began = time.monotonic()
    found = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in found)
    assert time.monotonic() - began < 100, told
    assert found[0].status == 1, told
    assert finals("".join(one.out for one in found)) == [], told
    assert launcher.survivors() == [], told
    assert lasting_shared_memory(before) == []


def test_a_host_that_has_taken_a_place_is_left_again_with_the_first_one(launcher: Launcher) -> None:
    four = of_one_host(launcher, 4)
    (launcher.directory / "steps").unlink(missing_ok=True)
    script = TRAINING.replace(STEP, STEP + ITS_PID)
    faults = ["rank=3 step=4", "rank=0 step=9", "rank=2 step=9"]
    with namespaces(5) as hosts:
        begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
        started = begin(faults, 3, IN_MEMORY, *NO_RESTART, script=script)
        found, told = ended(launcher, started, [0] * 5)
        assert finals("".join(one.out for one in found)) == four, told
        assert [len(finals(one.out)) for one in found[:2]] == [0, 0], told
        assert sorted(len(finals(one.out)) for one in found[2:]) == [0, 2, 2], told
        ranks = [one["ranks"] for one in moves(launcher)]
        assert (ranks[0], sorted(ranks[1:])) == ([2, 3], [[0, 1], [2, 3]]), told
        assert made_each_step_once(launcher, 4)


def test_a_killed_worker_starts_the_ranks_of_both_hosts_again(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """The first host's start there, as its launcher has stayed; the other one's where they have gone."""
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    started = begin(BOTH, 2, IN_MEMORY, "--max-restarts", "2", "--host-timeout", "5")
    launcher.wait_until(lambda: len(moves(launcher)) == 2)
    (killed,) = [pid for pid in workers(hosts, moves_to(hosts, 1), 3) if os.getsid(pid) == pid]
    os.kill(killed, signal.SIGKILL)
    (launcher.directory / "go").touch()
    found = [launcher.finish(one) for one in started]
    told = "\n=====\n".join(one.err for one in found)
    assert [one.status for one in found[:2]] == [0, 0], told
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found[:2]] == [2, 0], told


def test_two_devices_of_a_host_break_that_has_one_more(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str]
) -> None:
    """One rank takes that; then all go on elsewhere, as there is none for the other one."""
    begin = partial(job, launcher, hosts, standby=JITCKPT, jitckpt=both_at_once(launcher))
    faults = ["rank=0 step=8", "rank=1 step=8"]
    found, told = ended(launcher, begin(faults, 1, *NO_RESTART, devices=(3, 2)), [0] * 3)
    assert finals("".join(one.out for one in found)) == undisturbed, told
    assert [len(finals(one.out)) for one in found] == [0, 2, 2], told
    assert [one["ranks"] for one in moves(launcher)] == [[0, 1]]
