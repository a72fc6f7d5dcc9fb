"""`jitckpt run` on two hosts: real trainings on softgpu, in network namespaces."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import preloads
import pytest
from gpt import TRAINING, digests, run_of
from launcher import JITCKPT, Launcher, until_told
from namespaces import Namespaces, kill, namespaces
from programs_of_tests import text_of

from jitckpt.events import read_events
from jitckpt.ring import format as ring_format
from jitckpt.ring import local_state
from jitckpt.saves import folders

STORE = "10.79.0.1:29400"
LISTENING = "01004F0A:72D8"  # the same as in /proc/net/tcp
MEET = ["--rdzv-backend", "c10d", "--rdzv-endpoint", STORE]
# As torchrun has it where a host has several ranks: sums depend on it.
THREADS = ["OMP_NUM_THREADS=1"]
OPTIONS = ["--nproc-per-node", "1", "--device", "softgpu", "--warm-spares", "0", "--warm-start"]

# Runs the training; rank 0 pauses after a step of the first and of the second start, which its device has
# ended then.
PAUSING = text_of("hosts_pausing")


# Runs the training; rank 1 stops in the first restart before jitckpt knows of it, and in the second while it
# loads a save.
STOPPING = text_of("hosts_stopping")


# Runs the training; in the first start rank 1 stops when its device has ended a step, before the next one.
WAITING = text_of("hosts_waiting")


# `jitckpt`, whose agent copies what is new when a rank asks for it, and at no other time.
COPYING = text_of("hosts_copying")


# `jitckpt`, whose agent stops at the second meeting, when all others have agreed to start.
AGREEING = text_of("hosts_agreeing")


# A stranger, who writes what runs a program where it is unpickled into all entries of a job's rendezvous.
STRANGER = text_of("hosts_stranger")


@pytest.fixture(scope="module")
def undisturbed_of_three(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = Launcher(tmp_path_factory.mktemp("undisturbed")).succeed(*run_of(3), *TRAINING)
    return digests(out, 3)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(3) as found:
        yield found


class Job:
    """One agent on each host."""

    def __init__(self, launcher: Launcher, hosts: Namespaces) -> None:
        self.launcher, self.hosts = launcher, hosts

    def start(
        self,
        host: int,
        *command: str,
        directory: Path | None = None,
        meet: Sequence[str] = MEET,
        count: int = 2,
        jitckpt: Sequence[str] = JITCKPT,
    ) -> "subprocess.Popen[str]":
        """directory: of this host alone. count: of the job's hosts. jitckpt: the command."""
        own = [] if directory is None else ["--checkpoint-dir", str(directory / "ckpt")]
        where = ["env", "-C", str(directory or self.launcher.directory)]
        run = [*THREADS, *jitckpt, "run", "--nnodes", str(count), *meet, *OPTIONS, *own]
        return self.launcher.start(*self.hosts.on(host), *where, *run, *command)

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once."""
        kill(self.hosts, host)


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def opened(path: Path) -> int | None:
    """Open a descriptor of an agent's, as /proc has it, if it is a ring's."""
    with suppress(FileNotFoundError):  # the agent has closed it meanwhile
        if "jitckpt-local-state" in os.readlink(path):
            return os.open(path, os.O_RDONLY)
    return None


@contextmanager
def ring(agent: "subprocess.Popen[str]", rank: int) -> Iterator[int | None]:
    """Open the ring of a rank that its agent has, or the copy that another keeps; None if there is none."""
    for path in Path(f"/proc/{agent.pid}/fd").iterdir():
        if (descriptor := opened(path)) is None:
            continue
        try:
            identity = local_state.read_identity(descriptor)
            if identity is not None and identity.rank == rank:
                yield descriptor
                return
        finally:
            os.close(descriptor)
    yield None


def newest(agent: "subprocess.Popen[str]", rank: int) -> int:
    """Return the newest step of which there is a whole state."""
    with ring(agent, rank) as descriptor:
        states = [] if descriptor is None else local_state.read(descriptor)
        return max((state.step for state in states if not state.missing), default=0)


def wanted(agent: "subprocess.Popen[str]", rank: int) -> int:
    """Return after which step a save is wanted of the rank, 0 for none."""
    with ring(agent, rank) as descriptor:
        assert descriptor is not None
        return int.from_bytes(os.pread(descriptor, 8, ring_format.WANTED), "little")


def keep_one_step(holders: list[tuple["subprocess.Popen[str]", int]]) -> bool:
    """Return whether the newest state of all these agents' ranks, or copies, is of the same step."""
    steps = {newest(agent, rank) for agent, rank in holders}
    return len(steps) == 1 and steps != {0}


def await_line(agent: "subprocess.Popen[str]", text: str) -> None:
    assert agent.stdout is not None
    for line in agent.stdout:
        if line == text:
            return
    raise AssertionError(agent.communicate()[1])


def test_a_killed_rank_on_one_host_changes_no_bit(job: Job, undisturbed: list[str]) -> None:
    """The ranks of both hosts save and start again, and one of the agents tells of it.

    Before that the other agent was asked, by SIGUSR2, for a save beside the training.
    """
    # Early, so that the save is written by the time of the failure.
    pausing = job.launcher.script(PAUSING.replace('("0", "0"): 3', '("0", "0"): 1, ("0", "1"): 1'))
    command = ["--fault", "rank=1 step=12 phase=backward kind=kill", pausing, *TRAINING]
    agents = [job.start(host, *command) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    agents[1].send_signal(signal.SIGUSR2)
    job.launcher.wait_until(lambda: wanted(agents[0], 0) == wanted(agents[1], 1) != 0)
    step = wanted(agents[0], 0)
    (job.launcher.directory / "go").touch()
    first, second = (job.launcher.finish(agent) for agent in agents)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert digests(first.out + second.out) == undisturbed
    found = re.search(r"The state after step (\d+) was saved", first.err)
    assert found is not None, first.err
    assert step < int(found[1]) <= 11, "a host that is killed in step 12 may be steps ahead of its device"
    assert f"Restart 1 went on from step {found[1]}, with at most 1 minibatch done again" in first.err
    assert "The job succeeded after 1 restart." in first.err
    assert "own state" not in first.err + second.err, "no rank lost what it alone knew"
    told = [line for line in second.err.splitlines() if line.startswith("jitckpt:")]
    assert told == [f"jitckpt: SIGUSR2: the state after step {step} will be saved; the training goes on."]
    asked = [save for save in folders.find(job.launcher.directory / "ckpt") if save.step == step]
    assert {(save.kind, save.rank) for save in asked} >= {("rank", 0), ("local", 1)}
    assert [folders.verify(save) for save in asked] == [None] * len(asked)
    events, _ = read_events(job.launcher.directory / "ckpt")
    assert [event for event in events if event["event"] == "warning"] == [], "the hosts met again at once"


@pytest.mark.parametrize("has_secret", [False, True], ids=["no secret", "secret"])
def test_what_a_stranger_writes_into_the_store_is_not_run_and_stops_nothing(
    job: Job, undisturbed: list[str], has_secret: bool
) -> None:
    """Once before the hosts meet, and once before they meet again."""
    secret = job.launcher.directory / "secret"
    secret.touch(mode=0o600)
    secret.write_text("what only this job's hosts know")
    trace = job.launcher.directory / "trace"
    stranger = [sys.executable, job.launcher.script(STRANGER, "stranger.py"), str(trace), STORE]
    options = ["--secret-file", str(secret)] if has_secret else []
    command = ["--rdzv-conf", "keep_alive_interval=1", *options]
    command += ["--fault", "rank=1 step=5 phase=backward kind=kill", job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(0, *command)]
    job.launcher.wait_until(lambda: LISTENING in job.hosts.listening(0))
    assert job.launcher.run(*job.hosts.on(1), *stranger).out == "written\n"
    agents.append(job.start(1, *command))
    await_line(agents[0], "pauses\n")
    assert job.launcher.run(*job.hosts.on(1), *stranger).out == "written\n"
    (job.launcher.directory / "go").touch()
    ends = [job.launcher.finish(agent) for agent in agents]
    err = ends[0].err + ends[1].err
    assert [end.status for end in ends] == [0, 0], err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    assert not trace.exists()
    assert "in the rendezvous' store an entry was not signed with this job's secret" in err
    assert secret.read_text() not in err


def test_clocks_that_differ_change_nothing(job: Job, undisturbed: list[str]) -> None:
    """A rank is killed, and then the host whose time of day is an hour ahead is lost, and replaced."""
    clock = f"LD_PRELOAD={preloads.compiled(job.launcher.directory, 'clock')}"
    jitckpt = [["env", clock, f"CLOCK_AHEAD={3600 * host}", *JITCKPT] for host in (0, 1)]
    script = job.launcher.script(PAUSING.replace('("0", "0"): 3, ', ""))
    command = ["--rdzv-conf", "keep_alive_interval=1", "--fault", "rank=1 step=4 phase=backward kind=kill"]
    command += [script, *TRAINING]
    agents = [job.start(host, *command, jitckpt=jitckpt[host]) for host in (0, 1)]
    await_line(agents[0], "pauses\n")
    job.kill(1)
    agents[1] = job.start(1, *command, jitckpt=jitckpt[1])
    ends = [job.launcher.finish(agent) for agent in agents]
    err = ends[0].err + ends[1].err
    assert [end.status for end in ends] == [0, 0], err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    saves = (job.launcher.directory / "ckpt").glob("step-*/*/metadata.json")
    times = [float(re.findall(r'"time": ([0-9.]+)', save.read_text())[0]) for save in saves]
    assert max(times) - min(times) > 3000, "the clocks did differ"


def test_a_lost_host_loses_nothing(job: Job, tmp_path: Path, undisturbed: list[str]) -> None:
    """First host 1 is lost, then host 0 with the rendezvous' store; a new one takes the place of each.

    Each host has a checkpoint directory of its own, so a new one has no save.
    """
    command = ["--rdzv-conf", "keep_alive_interval=1", job.launcher.script(PAUSING), *TRAINING]
    directories = [tmp_path / "host-0", tmp_path / "host-1"]
    for directory in directories:
        directory.mkdir()
    agents = [job.start(host, *command, directory=directories[host]) for host in (0, 1)]
    for lost in (1, 0):
        await_line(agents[0], "pauses\n")
        # Rank 0 pauses after a step, and rank 1 waits for it in the next: both keep the state after it.
        holders = [(agents[0], 0), (agents[1], 1), (agents[1 - lost], lost)]
        job.launcher.wait_until(partial(keep_one_step, holders))
        job.kill(lost)
        shutil.rmtree(directories[lost] / "ckpt")
        if lost == 0:
            gone = f"the host that held the rendezvous' store at {STORE} is gone, or cut off. Start the same"
            told = until_told(agents[1], gone)
        agents[lost] = job.start(lost, *command, directory=directories[lost])
    ends = [job.launcher.finish(agent) for agent in agents]
    assert [end.status for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    err = ends[0].err + told + ends[1].err
    assert "host 0 (10.79.0.1) with rank 0 is lost: the connection has ended" in err
    three = "the other rank's, the local state of its own, and that of the rank that it keeps copies of"
    assert "from the others, in 3 saves" in ends[0].err, three
    assert "from the others, in 3 saves" in told + ends[1].err, three
    assert "own state" not in err, "no rank lost what it alone knew"


def test_what_a_device_keeps_is_on_another_host_before_any_rank_has_made_the_step(
    job: Job, undisturbed: list[str]
) -> None:
    """The host is lost right after the step; its agent copies what its rank asks for, and no more."""
    command = ["--rdzv-conf", "keep_alive_interval=1", job.launcher.script(WAITING), *TRAINING]
    copying = [sys.executable, job.launcher.script(COPYING, "copying.py")]
    agents = [job.start(host, *command, jitckpt=copying) for host in (0, 1)]
    await_line(agents[1], "stops\n")
    job.kill(1)
    agents[1] = job.start(1, *command, jitckpt=copying)
    ends = [job.launcher.finish(agent) for agent in agents]
    err = ends[0].err + ends[1].err
    assert [end.status for end in ends] == [0, 0], err
    assert "own state" not in err, "no rank lost what it alone knew"
    assert "Restart 1 went on from step 3, with at most 1 minibatch done again" in err
    assert digests(ends[0].out + ends[1].out) == undisturbed


def test_a_host_that_is_lost_in_a_restart_or_a_restore_loses_nothing(
    job: Job, tmp_path: Path, undisturbed: list[str]
) -> None:
    """Its rank has made no step since the last save, which the host has with its rank's own state.

    Each time its disk is lost, too: the other host has fetched all that it needs, and kept a copy of the own
    state of the rank that is lost.
    """
    training = ["--rdzv-conf", "keep_alive_interval=1", job.launcher.script(STOPPING), *TRAINING]
    command = ["--fault", "rank=0 step=5 phase=backward kind=kill", *training]
    directories = [tmp_path / "host-0", tmp_path / "host-1"]
    for directory in directories:
        directory.mkdir()
    agents = [job.start(host, *command, directory=directories[host]) for host in (0, 1)]
    await_line(agents[0], "started\n")
    for _ in range(2):
        await_line(agents[1], "stops\n")
        job.kill(1)
        shutil.rmtree(directories[1] / "ckpt")
        agents[1] = job.start(1, *training, directory=directories[1])
    ends = [job.launcher.finish(agent) for agent in agents]
    err = ends[0].err + ends[1].err
    assert [end.status for end in ends] == [0, 0], err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    assert "own state" not in err, "no rank lost what it alone knew"
    assert "no state of its own" not in err
    events, _ = read_events(directories[0] / "ckpt")
    restored = [(event["restart"], event["step"]) for event in events if event["event"] == "restored"]
    (step,) = {event["step"] for event in events if event["event"] == "saved"}
    assert {number for _, number in restored} == {step}, "nothing was done again but one minibatch"
    assert max(number for number, _ in restored) == 3


def test_of_three_hosts_two_go_on_without_the_one_with_the_store(
    job: Job, undisturbed_of_three: list[str]
) -> None:
    """The store is at another then, and the first, whose machine has started anew, finds its way there."""
    command = [job.launcher.script(PAUSING), *TRAINING]
    agents = [job.start(host, *command, count=3) for host in range(3)]
    await_line(agents[0], "pauses\n")
    holders = [(agents[0], 0), (agents[1], 0), (agents[1], 1), (agents[2], 2)]
    job.launcher.wait_until(partial(keep_one_step, holders))
    step = newest(agents[0], 0)
    job.kill(0)
    told = until_told(agents[1], "The store is at 10.79.0.2:")
    assert f"the host that held the rendezvous' store at {STORE} is gone." in told
    (job.launcher.directory / "go").touch()
    agents[0] = job.start(0, *command, count=3)
    ends = [job.launcher.finish(agent) for agent in agents]
    assert [end.status for end in ends] == [0, 0, 0], told + "".join(end.err for end in ends)
    assert digests("".join(end.out for end in ends), 3) == undisturbed_of_three
    assert "own state" not in told + "".join(end.err for end in ends), "no rank lost what it alone knew"
    events, _ = read_events(job.launcher.directory / "ckpt")
    restored = [event["step"] for event in events if event["event"] == "restored"]
    assert restored == [step] * 3, "nothing was done again but the minibatch of the failure"


def test_the_host_with_the_store_is_lost_while_all_agree_to_start_again(
    job: Job, undisturbed_of_three: list[str]
) -> None:
    """The others have agreed, and can't know whether all have, and whether somebody runs by now."""
    command = ["--rdzv-conf", "keep_alive_interval=1", job.launcher.script(PAUSING), *TRAINING]
    (job.launcher.directory / "go").touch()
    stopping = [sys.executable, job.launcher.script(AGREEING, "agreeing.py")]
    fault = ["--fault", "rank=2 step=5 phase=backward kind=kill"]
    agents = [job.start(0, *command, count=3, jitckpt=stopping)]
    agents += [job.start(host, *fault, *command, count=3) for host in (1, 2)]
    await_line(agents[0], "all others agree\n")
    job.kill(0)
    told = until_told(agents[1], "The store is at 10.79.0.2:")
    agents[0] = job.start(0, *command, count=3)
    ends = [job.launcher.finish(agent) for agent in agents]
    said = told + "".join(end.err for end in ends)
    assert [end.status for end in ends] == [0, 0, 0], said
    assert digests("".join(end.out for end in ends), 3) == undisturbed_of_three
    assert "own state" not in said, "no rank lost what it alone knew"
    events, _ = read_events(job.launcher.directory / "ckpt")
    (step,) = {event["step"] for event in events if event["event"] == "saved"}
    restored = [(event["restart"], event["step"]) for event in events if event["event"] == "restored"]
    assert restored == [(1, step)] * 3, "the start to which not all agreed is none"


def test_a_cable_that_is_cut_for_a_while_splits_no_job(job: Job, undisturbed: list[str]) -> None:
    """Each host thinks that the other is lost; the one with the store waits for another, the other for it.

    They were started as in a Slurm script, the first on host 1.
    """
    command = ["--host-timeout", "2", "--rdzv-conf", "keep_alive_interval=1"]
    command += [job.launcher.script(PAUSING), *TRAINING]
    master = ["--master-addr", "10.79.0.2", "--master-port", "29400"]
    agents = [
        job.start(host, *command, meet=[*master, "--node-rank", str(place)])
        for place, host in ((0, 1), (1, 0))
    ]
    await_line(agents[0], "pauses\n")
    with job.hosts.cable_cut():  # until both have noticed: else one hears of the other's end
        found = until_told(agents[0], "host 1 (10.79.0.1) with rank 1 is lost")
        told = until_told(agents[1], "It waits for at most 600 s.")
    (job.launcher.directory / "go").touch()
    ends = [job.launcher.finish(agent) for agent in agents]
    assert [end.status for end in ends] == [0, 0], found + ends[0].err + told + ends[1].err
    assert digests(ends[0].out + ends[1].out) == undisturbed
    assert "the host that held the rendezvous' store at 10.79.0.2:29400 is gone, or cut off." in told
    assert "host 1 (10.79.0.1) with rank 1 is lost: it has said nothing for 2 s" in found
