"""Supervisors of two hosts, in this process, over real processes that only play training ranks."""

import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from fork_server import python_path
from nccl_ras_server import STATUS, nccl_ras_server

from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.reports import Reports
from jitckpt.agent.supervisor import Supervisor
from jitckpt.decisions.recovery import Outcome
from jitckpt.events import Event, EventLog
from jitckpt.hosts import connections, link
from jitckpt.hosts.connections import Hosts
from jitckpt.system import nccl_ras
from jitckpt.wire.agents import RingPart
from jitckpt.wire.hosts import Host

SAVES = "register(); save(7)"


class Agents:
    """The part of two agents that looks after their ranks; host 0 has the first half of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts: list[Hosts] = []
        self.workers: list[Worker] = []
        self.logs = [EventLog(), EventLog()]
        self.supervisors: list[Supervisor] = []
        self.blamed: list[int] = []
        self.local_states: list[tuple[int, set[int]]] = []  # of which ring (its inode), for which steps
        self.copies: list[bytes] = []  # of rings, that were written
        self.host_missed: list[bool] = []  # what the agents said, for each ring

    def start(self, scripts: Sequence[str], silence: float = 60.0) -> None:
        half = len(scripts) // 2
        listeners = [connections.listen("127.0.0.1") for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in listeners]
        ranks = [tuple(range(half)), tuple(range(half, len(scripts)))]
        known = [Host("127.0.0.1", port, own, 0) for port, own in zip(ports, ranks, strict=True)]
        self.hosts = [Hosts(i, known, listener, b"secret", silence) for i, listener in enumerate(listeners)]
        self.hosts[1]._thread.start()
        self.hosts[0].connect(60)
        self.workers = [self._worker(rank, len(scripts), script) for rank, script in enumerate(scripts)]
        for index, own in enumerate(ranks):
            self.logs[index].leading = index == 0
            self.supervisors.append(
                Supervisor(
                    workers=[self.workers[rank] for rank in own],
                    log=self.logs[index],
                    reports=Reports(
                        heard=lambda *_: None,
                        registered=lambda *_: None,
                        failed=lambda *_: None,
                        write_local_states=self._write_local_states,
                        blamed=lambda worker: self.blamed.append(worker.rank),
                        last_copy=partial(self._last_copy, index),
                    ),
                    save_id=1,
                    save_deadline=60,
                    restarts_left=1,
                    answer_within=600.0,  # whoever can answers, however slow this machine may be
                    hosts=self.hosts[index],
                )
            )
        for supervisor in self.supervisors:
            supervisor.start()

    def _worker(self, rank: int, count: int, script: str) -> Worker:
        prologue = f"from fake_worker import *\nhere = {str(self.directory)!r}\n"
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "JITCKPT_RESTART": "0",
            "JITCKPT_CHECKPOINT_DIR": str(self.directory),
            "PYTHONPATH": python_path(),
        }
        return Worker(
            rank=rank,
            command=[sys.executable, "-c", prologue + textwrap.dedent(script)],
            environment=os.environ | environment,
            ring_fd=os.memfd_create("ring"),
            stdout=None,
            stderr=None,
        )

    def _last_copy(self, index: int) -> None:
        """Send the other host, which keeps copies, the last piece of the rings of this one's ranks."""
        for rank in self.hosts[index].all[index].ranks:
            self.hosts[index].send(1 - index, RingPart(rank, 6, 0), b"ring %d" % rank)

    def _write_local_states(
        self, ring: int, _directory: Path, steps: set[int], by: str, is_host_missed: bool
    ) -> dict[int, int]:
        self.host_missed.append(is_host_missed)
        if by:
            self.copies.append(os.pread(ring, 6, 0))
        else:
            self.local_states.append((os.fstat(ring).st_ino, steps))
        return dict.fromkeys(steps, 100)

    def await_registrations(self) -> None:
        """Wait until both agents know that all ranks have registered."""
        while any(len(self.events("registered", host)) < len(self.workers) for host in (0, 1)):
            time.sleep(0.01)

    def end_patience(self, answered: int, stopped: int) -> None:
        """Once one rank has answered, and another is known to be stopped, wait for no other answer."""
        investigation = self.supervisors[0]._hangs.investigation
        while (
            (question := investigation._question) is None
            or answered not in question.answers
            or stopped not in question.stopped
        ):
            time.sleep(0.01)
        question.next_look = 0.0
        self.supervisors[0]._requests.wake()

    def outcomes(self) -> list[Outcome]:
        return [supervisor.result() for supervisor in self.supervisors]

    def events(self, name: str, host: int = 0) -> list[Event]:
        return [event for event in self.logs[host].events if event["event"] == name]

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.stop(signal.SIGTERM)
        for host in self.hosts:
            host.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


def test_all_hosts_succeed_together(agents: Agents) -> None:
    agents.start(["register()", "wait_for(here + '/go')"])
    agents.workers[0].has_ended(within=60)
    assert not agents.supervisors[0]._done.wait(0.2), "the other host's rank still runs"
    (agents.directory / "go").touch()
    assert agents.outcomes() == [Outcome.SUCCEEDED] * 2


def test_the_ranks_of_all_hosts_save_and_one_replica_is_enough(agents: Agents) -> None:
    """Rank 3 can't save; rank 0 does, on another host."""
    dies = "register(); wait_for(here + '/go'); die()"
    agents.start([SAVES, "register(); hang()", dies, "register(); fail_to_save('no')"])
    agents.await_registrations()
    (agents.directory / "go").touch()
    assert agents.outcomes() == [Outcome.RESTART] * 2
    for host in (0, 1):
        (saved,) = agents.events("saved", host)
        assert saved["step"] == 7
        texts = [event["text"] for event in agents.events("detected", host)]
        assert texts == ["rank 2 was killed by SIGKILL"]
    rings = sorted(os.fstat(one.ring_fd).st_ino for one in agents.workers)
    assert sorted(ring for ring, _ in agents.local_states) == rings
    assert all(steps == {7} for _, steps in agents.local_states)
    assert not any(agents.host_missed)
    assert sorted(agents.copies) == [b"ring 0", b"ring 1", b"ring 2", b"ring 3"], (
        "the other host has written them too, up to the end: a host may be lost before it has written its own"
    )


def test_a_death_is_acted_on_by_all_hosts_before_the_process_has_ended(agents: Agents) -> None:
    agents.start([SAVES, "register(); wait_for(here + '/go'); die_slowly(3)"])
    agents.await_registrations()
    (agents.directory / "go").touch()
    assert agents.outcomes() == [Outcome.RESTART] * 2
    for host in (0, 1):
        assert [event["text"] for event in agents.events("detected", host)] == [
            "rank 1 ended with exit status 3"
        ]
        assert [event["step"] for event in agents.events("saved", host)] == [7]


def test_a_rank_that_another_host_has_stopped_is_found(agents: Agents) -> None:
    agents.start(
        [
            "register(); wait_for(here + '/go'); report_hang(); answer_one(); save(7)",
            "register(); die(signal.SIGSTOP)",
        ]
    )
    agents.await_registrations()
    while not agents.workers[1].is_stopped():
        time.sleep(0.01)
    (agents.directory / "go").touch()
    agents.end_patience(answered=0, stopped=1)
    assert agents.outcomes() == [Outcome.RESTART] * 2
    (detected, *_) = agents.events("detected")
    assert detected["text"].endswith("rank 1 does not answer, rank 1 is stopped")
    assert detected["cause"] == agents.events("detected", 1)[0]["cause"] == "hang"
    assert agents.blamed == [1], "by the agent of its host, which counts how often its device failed"


def test_the_report_of_a_hang_has_what_all_hosts_know(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late rank lives, and has kept the others waiting; its host, its driver and NCCL tell."""
    said = "3 s ago: NVRM: Xid (PCI:0000:3b:00): 79"
    monkeypatch.setattr("jitckpt.agent.host_messages.xid_lines", lambda _: [said])
    with nccl_ras_server() as address:
        monkeypatch.setenv(nccl_ras.ADDRESS, address)
        text = report_of_a_late_rank(agents)
    assert "where rank 1 has not arrived" in text
    assert "in <module>" in text.partition("Python stacks of rank 1:")[2]
    assert f"NVIDIA's driver on host 1 (127.0.0.1):\n  {said}\n" in text
    assert f"NCCL itself (its RAS service) says:\n{STATUS}" in text


def report_of_a_late_rank(agents: Agents) -> str:
    agents.start(
        [
            "register(); wait_for(here + '/go'); report_hang(seconds=600.0); answer_one(); "
            "save(7, after=here + '/hang-0-1.txt')",
            "register(); answer_one(); hang()",
        ]
    )
    agents.await_registrations()
    (agents.directory / "go").touch()
    assert agents.outcomes() == [Outcome.RESTART] * 2
    (report,) = agents.events("hang_report")
    return Path(report["path"]).read_text()


def test_an_agent_that_is_asked_to_end_takes_its_host_out(agents: Agents) -> None:
    agents.start([SAVES, SAVES])
    agents.await_registrations()
    agents.supervisors[1].interrupt(signal.SIGTERM)
    assert agents.outcomes() == [Outcome.RESTART, Outcome.INTERRUPTED]
    assert agents.supervisors[0].gone_hosts == {1}
    assert agents.supervisors[1].gone_hosts == set()


def test_a_host_whose_connection_ends_counts_as_killed(
    agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each thinks that it is the other that is lost, saves for itself, and says whose state nobody kept."""
    agents.start([SAVES, SAVES])
    agents.await_registrations()
    agents.hosts[0]._in_loop(agents.hosts[0]._writers[1].close)
    assert agents.outcomes() == [Outcome.RESTART] * 2
    assert [supervisor.gone_hosts for supervisor in agents.supervisors] == [{1}, {0}]
    assert all(agents.logs[host].leading for host in (0, 1))
    err = capsys.readouterr().err
    assert "host 1 (127.0.0.1) with rank 1 is lost" in err
    assert "host 0 (127.0.0.1) with rank 0 is lost" in err
    why = "the host that had a copy of it is lost, too, or had none yet; its own host may have it"
    for rank in (0, 1):
        assert f"rank {rank}'s own state (random numbers, buffers ...) is lost: {why}" in err


def test_a_host_that_is_lost_during_a_save_stops_no_save(agents: Agents) -> None:
    slow = "register(); save(7, after=here + '/lost')"
    agents.start([slow, slow, slow, "register(); wait_for(here + '/go'); die()"])
    agents.await_registrations()
    (agents.directory / "go").touch()
    while not all(agents.events("save_ordered", host) for host in (0, 1)):
        time.sleep(0.01)
    agents.hosts[0]._in_loop(agents.hosts[0]._writers[1].close)
    while not all(
        any(event["cause"] == "host" for event in agents.events("detected", host)) for host in (0, 1)
    ):
        time.sleep(0.01)
    (agents.directory / "lost").touch()
    assert agents.outcomes() == [Outcome.RESTART] * 2
    assert [event["step"] for host in (0, 1) for event in agents.events("saved", host)] == [7, 7]
    assert [supervisor.gone_hosts for supervisor in agents.supervisors] == [{1}, {0}]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"type": "said", "rank": 99, "text": "{}"},
        {"type": "said", "rank": 1, "text": "no JSON"},
        {"type": "ended", "rank": 1, "exit_code": "x", "told": "nothing"},
        {"type": "order", "rank": 1, "text": "{}"},
        {"type": "ring_part", "rank": 1, "size": 10, "at": 4096},
        {"type": "stopped", "rank": None},
        {"type": "something else"},
        {"rank": 1, "said": 7},
    ],
)
def test_what_makes_no_sense_is_noted_and_changes_nothing(
    agents: Agents, nonsense: dict[str, object]
) -> None:
    agents.start(["wait_for(here + '/go')"] * 2)
    other = agents.hosts[1]
    other._in_loop(other._write, (0,), link.encode(nonsense, b"data"))
    while not agents.events("warning"):
        time.sleep(0.01)
    assert "host 1 (127.0.0.1) says what makes no sense" in agents.events("warning")[0]["text"]
    (agents.directory / "go").touch()
    assert agents.outcomes() == [Outcome.SUCCEEDED] * 2


def test_agents_without_a_descriptor_left_have_their_ranks_save(agents: Agents) -> None:
    """When a rank dies there is none for a look at the others, or for the log."""
    agents.start([SAVES, "register(); wait_for(here + '/go'); die()"])
    agents.await_registrations()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    go = os.open(agents.directory, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        os.mkdir("go", dir_fd=go)
        outcomes = agents.outcomes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(go)
    assert outcomes == [Outcome.RESTART] * 2
    assert [event["step"] for host in (0, 1) for event in agents.events("saved", host)] == [7, 7]
