"""What a supervisor hears from another host: whatever it says, the supervisor goes on."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.agent.supervisor import Reports, Supervisor
from jitckpt.decisions.recovery import Wait, decide
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, Host
from jitckpt.wire import protocol

# Nobody who acts on what is heard.
NOBODY = Reports(
    heard=lambda *_: None,
    registered=lambda *_: None,
    failed=lambda *_: None,
    write_local_states=lambda *_: {},
)


class TwoHosts:
    """Of which this is the first; what the other says comes from the test."""

    index, all, wake = 0, (Host("a", 1, (0,), 0), Host("b", 1, (1,), 0)), -1

    def __init__(self, said: list[Arrived]) -> None:
        self.said = said

    def take(self) -> list[Arrived]:
        return self.said

    def name(self, host: int) -> str:
        return f"host {host}"

    def host_of(self, rank: int) -> int:
        return rank

    def send(self, *_: object) -> None:
        pass

    broadcast = send


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
# What agents say, with something else in the place of parts of it.
KEYS = [
    ("rank", "said"),
    ("rank", "exit_code", "told"),
    ("rank", "order"),
    ("proxy",),
    ("proxy", "gone"),
    ("stopped",),
    ("ring", "size", "at"),
    ("want_save",),
    ("alarm", "text", "blamed"),
    ("stacks_wanted",),
    ("stacks_of", "driver"),
    ("something else",),
]
sensible = st.sampled_from(
    [0, 1, "kill", "nothing", -9, 4096, [1], protocol.encode(protocol.Resume()).decode()]
)


@st.composite
def messages(draw: st.DrawFn) -> Arrived:
    header = {key: draw(sensible | json_values) for key in draw(st.sampled_from(KEYS))}
    return Arrived(1, header, draw(st.binary(max_size=8)))


@settings(deadline=None)
@given(st.lists(messages(), max_size=5))
def test_nonsense_from_another_host_is_noted_and_passed_over(said: list[Arrived]) -> None:
    hosts: Any = TwoHosts(said)
    log = EventLog()
    supervisor = Supervisor(
        workers=[], log=log, reports=NOBODY, save_id=1, save_deadline=60, restarts_left=1, hosts=hosts
    )
    supervisor._hear_hosts()
    decide(supervisor._job)
    supervisor._copies.close()
    os.close(supervisor._wake)
    for event in log.events:
        assert event["event"] != "warning" or "host 1 says what makes no sense" in event["text"]


@pytest.mark.parametrize("told", ["kill", "terminate"])
def test_what_another_host_has_ended_is_a_failure_that_it_has_seen(told: str) -> None:
    """A link that is cut one way: the other host is told nothing, and acts; of that this one hears."""
    log = EventLog()
    hosts: Any = TwoHosts([Arrived(1, {"rank": 1, "exit_code": -9, "told": told}, b"")])
    supervisor = Supervisor(
        workers=[], log=log, reports=NOBODY, save_id=1, save_deadline=60, restarts_left=1, hosts=hosts
    )
    supervisor._hear_hosts()
    assert not isinstance(decide(supervisor._job), Wait), "it acts"
    supervisor._order_save((0,))
    supervisor._copies.close()
    os.close(supervisor._wake)
    assert [event["text"] for event in log.events if event["event"] == "detected"] == [
        "rank 1 was ended by its host, which has seen a failure"
    ]


def test_what_makes_no_sense_is_noted() -> None:
    log = EventLog()
    hosts: Any = TwoHosts([Arrived(1, {"rank": [], "exit_code": 0, "told": {}}, b"")])
    supervisor = Supervisor(
        workers=[], log=log, reports=NOBODY, save_id=1, save_deadline=60, restarts_left=1, hosts=hosts
    )
    supervisor._hear_hosts()
    os.close(supervisor._wake)
    (event,) = log.events
    assert "host 1 says what makes no sense: ValueError" in event["text"]


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
    supervisor._investigation = investigation
    hang = protocol.Hang("c", 7, "ncclAllReduce", 4, 61.0)
    supervisor._hear(1, hang)
    assert (looked_into, supervisor._job.suspected) == ([], False)
    proxies.recovers = False
    supervisor._look_into_hangs()
    supervisor._hear(0, hang)
    assert (looked_into, supervisor._job.suspected) == ([1, 0], True)
    supervisor._copies.close()
    os.close(supervisor._wake)
