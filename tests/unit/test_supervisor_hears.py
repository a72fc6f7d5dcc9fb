"""What a supervisor hears from another host: whatever it says, the supervisor goes on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_protocol import json_values

from jitckpt.agent.control.requests import SAME_REQUEST_SECONDS, Requests
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.reports import Reports
from jitckpt.agent.supervisor import Supervisor
from jitckpt.decisions.recovery import EndRanks, LetEnd, Outcome, Wait, decide
from jitckpt.errors import SaveError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, HostLost, Unclear, heard
from jitckpt.ring import local_state, wishes
from jitckpt.saves.starts import Superseded
from jitckpt.wire import agents, protocol
from jitckpt.wire.hosts import Host

# Nobody who acts on what is heard.
NOBODY = Reports(
    heard=lambda *_: None,
    registered=lambda *_: None,
    failed=lambda *_: None,
    write_local_states=lambda *_: {},
)


class TwoHosts:
    """Of which this is one; what the other says comes from the test."""

    all, wake = (Host("a", 1, (0,), 0), Host("b", 1, (1,), 0)), -1

    def __init__(self, said: Sequence[Arrived | Unclear | HostLost], index: int = 0) -> None:
        self.said, self.index = said, index

    def take(self) -> Sequence[Arrived | Unclear | HostLost]:
        return self.said

    def name(self, host: int) -> str:
        return f"host {host}"

    def host_of(self, rank: int) -> int:
        return rank

    def send(self, *_: object) -> None:
        pass

    broadcast = send


# What agents say, with something else in the place of parts of it.
sensible = st.sampled_from(
    [0, 1, "kill", "nothing", -9, 4096, [1], True, protocol.encode(protocol.Resume()).decode()]
)


@st.composite
def messages(draw: st.DrawFn) -> Arrived | Unclear:
    kind = draw(st.sampled_from([*agents.KINDS.values()]))
    content = {one.name: draw(sensible | json_values) for one in fields(kind) if draw(st.integers(0, 9))}
    name = draw(st.just(kind.type) | json_values)
    return heard(1, {"type": name} | content, draw(st.binary(max_size=8)))


@settings(deadline=None)
@given(st.lists(messages(), max_size=5))
def test_nonsense_from_another_host_is_noted_and_passed_over(said: list[Arrived | Unclear]) -> None:
    hosts: Any = TwoHosts(said)
    log = EventLog()
    supervisor = Supervisor(
        workers=[], log=log, reports=NOBODY, save_id=1, save_deadline=60, restarts_left=1, hosts=hosts
    )
    supervisor._hear_hosts()
    decide(supervisor._known.job)
    supervisor._local_states.close()
    supervisor._requests.close()
    for event in log.events:
        assert event["event"] != "warning" or "host 1 says what makes no sense" in event["text"]


def test_a_periodic_save_is_whole_once_all_shards_are_written() -> None:
    """By then the ranks know that there is a file to go back to; half of one is nothing."""
    ring = local_state.create()
    worker: Any = SimpleNamespace(rank=0, ring_fd=ring)
    written = [protocol.PeriodicSave(rank, rank, 5, "there", 1, 0.1, True) for rank in (0, 1)]
    hosts: Any = TwoHosts([Arrived(1, agents.Said(1, protocol.encode(written[1]).decode()))])
    supervisor = Supervisor(
        workers=[worker],
        log=EventLog(),
        reports=NOBODY,
        save_id=1,
        save_deadline=60,
        restarts_left=1,
        hosts=hosts,
    )
    for rank in (0, 1):
        supervisor._known.change(rank, registered=True, shard=rank, shards=2)
    supervisor._messages.hear(0, written[0])
    supervisor._messages.hear(0, replace(written[0], step=10))
    supervisor._messages.hear(1, replace(written[1], of_shard=False))  # a replica's: not of the shard
    assert not wishes.is_saved_whole(ring)
    supervisor._hear_hosts()
    assert wishes.is_saved_whole(ring)
    supervisor._local_states.close()
    supervisor._requests.close()
    os.close(ring)


@pytest.mark.parametrize("told", ["kill", "terminate"])
def test_what_another_host_has_ended_is_a_failure_that_it_has_seen(told: agents.Told) -> None:
    """A link that is cut one way: the other host is told nothing, and acts; of that this one hears."""
    log = EventLog()
    hosts: Any = TwoHosts([Arrived(1, agents.Ended(1, -9, told))])
    supervisor = Supervisor(
        workers=[], log=log, reports=NOBODY, save_id=1, save_deadline=60, restarts_left=1, hosts=hosts
    )
    supervisor._hear_hosts()
    assert not isinstance(decide(supervisor._known.job), Wait), "it acts"
    supervisor._actions.order_save((0,))
    supervisor._local_states.close()
    supervisor._requests.close()
    assert [event["text"] for event in log.events if event["event"] == "detected"] == [
        "rank 1 was ended by its host, which has seen a failure"
    ]


class SecondHost:
    """Which is to tell the user nothing, until it hears that the first one is lost."""

    def __init__(self, in_memory: int | None) -> None:
        self.others = TwoHosts([], index=1)
        hosts: Any = self.others
        self.failed: list[tuple[list[int], str, set[int]]] = []
        protection: Any = SimpleNamespace(
            step_that_stays=lambda lost: in_memory,
            have_failed=lambda ranks, health, lost: self.failed.append(([*ranks], health, {*lost})),
        )
        self.log = EventLog()
        self.log.leading = False
        self.supervisor = Supervisor(
            workers=[],
            log=self.log,
            reports=NOBODY,
            save_id=1,
            save_deadline=60,
            restarts_left=1,
            hosts=hosts,
            protection=protection,
        )
        self.supervisor._known.note(in_memory=in_memory)

    def hear(self, said: Arrived | HostLost) -> None:
        self.others.said = [said]
        self.supervisor._hear_hosts()


@pytest.fixture
def second_host(request: pytest.FixtureRequest) -> Iterator[SecondHost]:
    host = SecondHost(request.param)
    yield host
    host.supervisor._local_states.close()
    host.supervisor._requests.close()


FAILED = Arrived(0, agents.HostAlarm("nccl_error", "a collective of rank 1 failed", [1]))
LOST = "jitckpt: host 0 with rank 0 is lost: the connection has ended.\n"


@pytest.mark.parametrize("second_host", [7], indirect=True)
def test_what_is_in_memory_is_told_if_it_was_decided_before_the_loss_of_the_first_host_was_known(
    second_host: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank whose peer is lost fails, and that may be known before the loss of the host."""
    second_host.hear(FAILED)
    second_host.supervisor._actions.end((0, 1), ())
    assert capsys.readouterr().err == ""
    second_host.hear(HostLost(0, "the connection has ended"))
    told = "jitckpt: the state after step 7 is in memory; no file is needed.\n"
    assert capsys.readouterr().err == LOST + told


@pytest.mark.parametrize("second_host", [None], indirect=True)
def test_who_saves_is_told_if_it_was_ordered_before_the_loss_of_the_first_host_was_known(
    second_host: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    second_host.hear(FAILED)
    second_host.supervisor._actions.order_save((1,))
    second_host.supervisor._known.change(1, save="ordered")
    assert capsys.readouterr().err == ""
    second_host.hear(HostLost(0, "the connection has ended"))
    assert capsys.readouterr().err == f"{LOST}jitckpt: rank 1 may take 60 s to save the state.\n"


@pytest.mark.parametrize("second_host", [None], indirect=True)
def test_a_save_that_is_heard_of_as_the_ranks_are_being_ended_counts(
    second_host: SecondHost, tmp_path: Path
) -> None:
    """An agent that is asked twice to end waits for no save; one may have ended that it has not heard of."""
    registered = protocol.Registered(0, 1, 2, 0, 1, "fingerprint", "builtin", str(tmp_path))
    ended = protocol.SaveEnded(save_id=1, rank=0, shard=0, step=7, path="p", bytes=1, seconds=1.0)
    second_host.hear(Arrived(0, agents.Said(0, protocol.encode(registered).decode())))
    second_host.supervisor._actions.end((1,), ())
    second_host.hear(Arrived(0, agents.Said(0, protocol.encode(ended).decode())))
    told = [event["event"] for event in second_host.log.events]
    assert told == ["registered", "not_saved", "ranks_ended", "save_ended", "saved"]


@pytest.mark.parametrize("second_host", [7], indirect=True)
def test_a_host_is_lost_also_once_its_ranks_have_failed(
    second_host: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ends a host may end its ranks first; what it kept in memory is gone all the same."""
    second_host.hear(Arrived(0, agents.Ended(0, -9, "nothing")))
    second_host.supervisor._actions.end((1,), ())
    second_host.hear(HostLost(0, "the connection has ended"))
    assert second_host.failed == [([0], "unhealthy", set()), ([0], "offline", {0})]
    assert second_host.supervisor.gone_hosts == {0}
    assert capsys.readouterr().err.startswith(LOST)


@pytest.mark.parametrize("second_host", [7], indirect=True)
def test_a_host_whose_ranks_have_succeeded_is_not_lost(
    second_host: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    second_host.hear(Arrived(0, agents.Ended(0, 0, "nothing")))
    second_host.hear(HostLost(0, "the connection has ended"))
    assert second_host.supervisor.gone_hosts == set()
    assert capsys.readouterr().err == ""


@pytest.fixture
def with_lead() -> Iterator[SecondHost]:
    """The first host has no ranks any more: a third one has."""
    host = SecondHost(None)
    first, second = TwoHosts.all
    host.others.all = (replace(first, ranks=()), second, Host("c", 1, (0,), 0, ranks_of=0))  # type: ignore[assignment]
    yield host
    host.supervisor._local_states.close()
    host.supervisor._requests.close()


LEAD_LOST = "jitckpt: host 0 with the lead and the ranks' store is lost: the connection has ended.\n"


def test_a_host_that_has_no_ranks_but_the_lead_is_missed(
    with_lead: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    with_lead.hear(HostLost(0, "the connection has ended"))
    assert with_lead.supervisor.gone_hosts == {0}
    assert isinstance(decide(with_lead.supervisor._known.job), EndRanks)
    assert with_lead.supervisor._hosts.leads()
    assert capsys.readouterr().err == LEAD_LOST


def test_a_host_that_has_the_lead_alone_is_not_missed_at_the_end(
    with_lead: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be known sooner that its agent has ended than that all others' ranks have."""
    for rank in (0, 1):
        at_end = protocol.encode(protocol.AtEnd(rank)).decode()
        with_lead.hear(Arrived(2 if rank == 0 else 1, agents.Said(rank, at_end)))
    with_lead.hear(Arrived(2, agents.Ended(0, 0, "nothing")))
    with_lead.hear(HostLost(0, "the connection has ended"))
    assert with_lead.supervisor.gone_hosts == set()
    assert isinstance(decide(with_lead.supervisor._known.job), LetEnd | Wait)
    assert capsys.readouterr().err == ""


def test_a_host_that_has_the_lead_alone_is_missed_where_a_rank_has_failed_and_all_start_again(
    with_lead: SecondHost, capsys: pytest.CaptureFixture[str]
) -> None:
    with_lead.hear(Arrived(2, agents.Ended(0, 1, "nothing")))
    with_lead.hear(HostLost(0, "the connection has ended"))
    assert with_lead.supervisor.gone_hosts == {0}
    assert LEAD_LOST in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "is_lost"),
    [(SaveError("The disk is full."), True), (Superseded("The job has gone on without this host."), False)],
)
def test_a_host_that_the_job_has_gone_on_without_tells_of_no_losses(
    tmp_path: Path, problem: SaveError, is_lost: bool
) -> None:
    """The others have gone on from what they have; whether something is lost they say."""

    def write(*_: object) -> dict[int, int]:
        raise problem

    log = EventLog()
    ended = threading.Event()
    with open(os.devnull) as ring:
        worker = cast(Worker, SimpleNamespace(ring_fd=ring.fileno()))
        registration = cast(protocol.Registered, SimpleNamespace(checkpoint_dir=str(tmp_path)))
        states = LocalStates({0: worker}, {0: registration}, None, set(), bool, log, write, ended.set)
        states.all_have_ended({7}, is_in_memory=False)
        assert ended.wait(60)
    assert states.are_written()
    states.close()
    warnings = [event["text"] for event in log.events if event["event"] == "warning"]
    lost = "rank 0's own state (random numbers, buffers ...) is lost: The disk is full."
    assert warnings == [lost] * is_lost


NOTED = "host 1 says what makes no sense: "


@pytest.mark.parametrize(
    ("header", "noted"),
    [
        ({"type": "ended", "rank": [], "exit_code": 0, "told": {}}, "of type ended, rank can't be []"),
        ({"type": "ended", "rank": True, "exit_code": 0, "told": "kill"}, "rank can't be True"),
        ({"type": "ended", "rank": 1, "exit_code": 0, "told": "no"}, "told can't be 'no'"),
        ({"type": "alarm", "cause": "hang", "text": "", "blamed": ["1"]}, "blamed can't be ['1']"),
        ({"type": "alarm", "cause": "hang"}, "of type alarm lacks text, blamed"),
        ({"type": "counted", "hosts": [1], "steps": "1"}, "steps can't be '1'"),
        ({"rank": 1, "exit_code": 0}, "has the unknown type None"),
        ({"type": "takes_in", "who": "a host"}, "Nobody here has a use for TakesIn(who='a host')"),
        ({"type": "ended", "rank": 7, "exit_code": 0, "told": "kill"}, "KeyError('rank 7')"),
    ],
)
def test_what_makes_no_sense_is_noted_in_a_sentence(header: dict[str, Any], noted: str) -> None:
    log = EventLog()
    hosts: Any = TwoHosts([heard(1, header, b"")])
    supervisor = Supervisor(
        workers=[], log=log, reports=NOBODY, save_id=1, save_deadline=60, restarts_left=1, hosts=hosts
    )
    supervisor._hear_hosts()
    supervisor._requests.close()
    (event,) = log.events
    assert event["text"].startswith(NOTED)
    assert noted in event["text"]


def test_what_was_said_to_the_host_in_whose_place_this_one_comes_ends_no_control_thread() -> None:
    """It was noted as nonsense only where it came over a connection of this agent's own."""
    log = EventLog()
    hosts: Any = TwoHosts([])
    hosts.wake = os.eventfd(0)
    supervisor = Supervisor(
        workers=[],
        log=log,
        reports=NOBODY,
        save_id=1,
        save_deadline=60,
        restarts_left=1,
        hosts=hosts,
        said_before=[Arrived(1, agents.ProcessStopped(7)), Arrived(1, agents.Ended(1, 1, "nothing"))],
    )
    supervisor.start()
    supervisor.stop(signal.SIGTERM)
    os.close(hosts.wake)
    assert supervisor.result() in Outcome
    assert any(event.get("text") == f"{NOTED}KeyError('rank 7')" for event in log.events)


def test_a_hang_is_transparent_modes_affair_until_that_gives_up() -> None:
    looked_into: list[int] = []
    proxies: Any = SimpleNamespace(recovers=True)
    supervisor = Supervisor(
        workers=[],
        log=EventLog(),
        reports=NOBODY,
        save_id=1,
        save_deadline=60,
        restarts_left=1,
        proxies=proxies,
    )
    investigation: Any = SimpleNamespace(begin=lambda rank, *_: looked_into.append(rank))
    supervisor._hangs.investigation = investigation
    hang = protocol.Hang("c", 7, "ncclAllReduce", 4, 61.0)
    supervisor._messages.hear(1, hang)
    assert (looked_into, supervisor._known.job.suspected) == ([], False)
    proxies.recovers = False
    supervisor._hangs.look_into_waiting()
    supervisor._messages.hear(0, hang)
    assert (looked_into, supervisor._known.job.suspected) == ([1, 0], True)
    supervisor._local_states.close()
    supervisor._requests.close()


# A signal comes to another thread, as it may where it comes just before the main one waits.
WAITS = """
import signal, threading, time
from jitckpt.agent.supervisor import Supervisor

supervisor = Supervisor.__new__(Supervisor)
supervisor._done, supervisor._outcome = threading.Event(), "ended"
signal.signal(signal.SIGTERM, lambda *_: supervisor._done.set())

def send():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(1000)

threading.Thread(target=send, daemon=True).start()
print(supervisor.result())
"""


def test_a_signal_that_does_not_wake_the_main_thread_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, timeout=100, check=True)
    assert done.stdout == b"ended\n"


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper (uv run, srun) passes on what the agent gets by itself: that is nobody's impatience."""
    now = 100.0
    monkeypatch.setattr("jitckpt.agent.control.requests.time.monotonic", lambda: now)
    requests = Requests(is_over=lambda: False)
    requests.interrupt(signal.SIGINT)
    now += SAME_REQUEST_SECONDS / 2
    requests.interrupt(signal.SIGTERM)
    assert requests.interrupts == [signal.SIGINT]
    now += SAME_REQUEST_SECONDS
    requests.interrupt(signal.SIGINT)
    assert requests.interrupts == [signal.SIGINT, signal.SIGINT]
    requests.close()
