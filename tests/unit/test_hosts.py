"""The agents of several hosts, all in this process: who meets whom, and how a loss is noticed."""

import asyncio
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.hosts import connections, link
from jitckpt.hosts.connections import Arrived, HostLost, Hosts, Unclear
from jitckpt.wire.agents import LastWords, TakesIn, WantSave
from jitckpt.wire.hosts import Host

SECRET = b"what only this job's agents know"
PATIENCE = 60.0


class Meeting:
    def __init__(self) -> None:
        self.hosts: list[Hosts] = []

    def prepare(self, count: int, secrets: Sequence[bytes] = (), silence: float = PATIENCE) -> list[Hosts]:
        listeners = [connections.listen("127.0.0.1") for _ in range(count)]
        known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
        for i, listener in enumerate(listeners):
            self.hosts.append(Hosts(i, known, listener, secrets[i] if secrets else SECRET, silence))
        return self.hosts

    def meet(self, count: int) -> list[Hosts]:
        for host in self.prepare(count)[1:]:
            host._thread.start()
        self.hosts[0].connect(PATIENCE)
        return self.hosts


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    for host in meeting.hosts:
        host.close()


def take(host: Hosts) -> Arrived | Unclear | HostLost:
    """Wait for the next thing."""
    taken = host.take()
    while not taken:
        assert select.select([host.wake], [], [], PATIENCE)[0], "nothing came"
        taken = host.take()
    assert len(taken) == 1, taken
    return taken[0]


def test_every_host_can_speak_to_every_other(meeting: Meeting) -> None:
    a, b, c = meeting.meet(3)
    a.send(2, TakesIn("c"), b"data")
    assert take(c) == Arrived(0, TakesIn("c"), b"data")
    c.send(0, TakesIn("a"))
    assert take(a) == Arrived(2, TakesIn("a"))
    a.broadcast(TakesIn("all"))
    assert [take(b), take(c)] == [Arrived(0, TakesIn("all"))] * 2
    assert (c.name(1), c.host_of(2)) == ("host 1 (127.0.0.1)", 2)


def test_what_is_given_back_comes_again_before_all_else(meeting: Meeting) -> None:
    a, b = meeting.meet(2)
    b.send(0, TakesIn("first"))
    first = take(a)
    b.send(0, TakesIn("second"))
    assert select.select([a.wake], [], [], PATIENCE)[0]
    a.give_back([first])
    assert a.take() == [first, Arrived(1, TakesIn("second"))]
    a.give_back([first])
    assert take(a) == first


def test_what_was_sent_before_the_end_arrives_before_the_loss(meeting: Meeting) -> None:
    a, b = meeting.meet(2)
    for number in range(100):
        b.send(0, WantSave(number), bytes(100_000))
    b.close()
    meeting.hosts.remove(b)
    taken: list[Arrived | Unclear | HostLost] = []
    while not taken or isinstance(taken[-1], Arrived):
        assert select.select([a.wake], [], [], PATIENCE)[0]
        taken += a.take()
    assert taken[:-1] == [Arrived(1, WantSave(number), bytes(100_000)) for number in range(100)]
    assert taken[-1] == HostLost(1, "the connection has ended")
    a.send(1, WantSave(1))


def test_who_leaves_waits_for_no_last_words_of_a_lost_host(meeting: Meeting) -> None:
    a, b = meeting.meet(2)
    b.close()
    meeting.hosts.remove(b)
    assert take(a) == HostLost(1, "the connection has ended")
    assert a.hand_over(a.all[0], 10.0)


def test_who_comes_in_a_hosts_place_has_its_own_store_in_reserve(meeting: Meeting) -> None:
    a, b = meeting.meet(2)
    assert not a.is_changed
    coming = replace(b.all[1], port=4711, reserve=4712)
    assert b.hand_over(coming, PATIENCE)
    assert (a.is_changed, a.all[1]) == (True, coming)


def test_nobody_looks_for_a_host_any_more_that_another_one_has_come_for(meeting: Meeting) -> None:
    """It may have been awaited a moment ago: nobody listens where it was, which is no loss of the other."""
    a, b = meeting.meet(2)
    listener = connections.listen("127.0.0.1")
    coming = replace(b.all[1], port=listener.getsockname()[1])
    assert b.hand_over(coming, PATIENCE)
    b.close()
    meeting.hosts.remove(b)
    time.sleep(2 * connections.HEARTBEAT)  # until whoever looks for it has done so
    meeting.hosts.append(Hosts(1, [a.all[0], coming], listener, SECRET, PATIENCE, takes_place=True))
    meeting.hosts[-1].connect(PATIENCE)
    meeting.hosts[-1].send(0, TakesIn("here"))
    assert take(a) == Arrived(1, TakesIn("here"))


class GivenRanks:
    """Three hosts, of which the first stays without its rank. comes: it goes on on one more."""

    def __init__(self, meeting: Meeting, silence: float = PATIENCE) -> None:
        self.meeting, self.hosts = meeting, [*meeting.prepare(3, silence=silence)]
        for host in self.hosts[1:]:
            host._thread.start()
        self.hosts[0].connect(PATIENCE)
        for host in self.hosts[1:]:
            assert all(connected.wait(PATIENCE) for connected in host._connected.values())
        self.listener = connections.listen("127.0.0.1")
        self.hosts[1].broadcast(TakesIn("before"))
        assert take(self.hosts[2]) == Arrived(1, TakesIn("before"))
        to = Host("127.0.0.1", self.listener.getsockname()[1], (0,), 0, ranks_of=0)
        assert self.hosts[0].give_ranks(to, PATIENCE)
        assert [host.all for host in self.hosts] == [(*self.hosts[1].all[:3], to)] * 3
        self.hosts[1].broadcast(TakesIn("after"))
        self.hosts[0].send(3, TakesIn("of the first"))

    def come(self) -> Hosts:
        made = Hosts(3, self.hosts[0].all, self.listener, SECRET, PATIENCE, takes_place=True)
        self.meeting.hosts.append(made)
        made.connect(PATIENCE)
        return made


def taken(host: Hosts, count: int) -> list[Arrived | Unclear | HostLost]:
    found: list[Arrived | Unclear | HostLost] = []
    while len(found) < count:
        assert select.select([host.wake], [], [], PATIENCE)[0], f"only {found} came"
        found += host.take()
    return found


def test_ranks_of_a_host_that_stays_are_on_one_more(meeting: Meeting) -> None:
    """Whom it is said to by others is parted by their last words: no word is lost, and none comes twice."""
    given = GivenRanks(meeting)
    a, b, c = given.hosts
    assert [host.host_of(0) for host in given.hosts] == [3] * 3
    d = given.come()
    said = taken(a, 4)
    assert {one.host for one in said if one.message == LastWords()} == {1, 2}  # type: ignore[union-attr]
    mine = [one.message for one in said if one.host == 1]  # type: ignore[union-attr]
    assert mine == [TakesIn("before"), LastWords(), TakesIn("after")]
    assert sorted(map(str, taken(d, 2))) == sorted(
        map(str, [Arrived(1, TakesIn("after")), Arrived(0, TakesIn("of the first"))])
    )
    assert take(c) == Arrived(1, TakesIn("after"))
    d.broadcast(TakesIn("of the new one"))
    assert [take(host) for host in given.hosts] == [Arrived(3, TakesIn("of the new one"))] * 3
    b.broadcast(TakesIn("to all"))
    assert [take(host) for host in (a, c, d)] == [Arrived(1, TakesIn("to all"))] * 3


def test_one_more_host_may_be_left_as_any(meeting: Meeting) -> None:
    given = GivenRanks(meeting)
    d = given.come()
    taken(d, 2)
    listener = connections.listen("127.0.0.1")
    to = Host("127.0.0.1", listener.getsockname()[1], (0,), 0, ranks_of=0)
    assert d.hand_over(to, PATIENCE)
    known = [*given.hosts[0].all[:3], to]
    meeting.hosts.append(Hosts(3, known, listener, SECRET, PATIENCE, takes_place=True))
    meeting.hosts[-1].connect(PATIENCE)
    assert not meeting.hosts[-1].lost
    assert {host.all for host in given.hosts} == {tuple(known)}


def test_one_more_host_that_never_comes_is_lost(meeting: Meeting) -> None:
    given = GivenRanks(meeting, silence=0.2)
    lost = HostLost(3, "it has not come within 1.2 s")
    assert taken(given.hosts[1], 1) == [lost]
    assert lost in taken(given.hosts[0], 5)
    given.listener.close()


def test_a_host_that_never_comes_is_lost(meeting: Meeting) -> None:
    a, _ = meeting.prepare(2)
    a.connect(0.1)
    assert take(a) == HostLost(1, "no connection to host 1 (127.0.0.1) could be made within 0.1 s")


def test_a_host_that_nobody_answers_for_is_lost(meeting: Meeting) -> None:
    a, b = meeting.prepare(2)
    a.close()
    meeting.hosts.remove(a)
    b.connect(PATIENCE)
    lost = take(b)
    assert isinstance(lost, HostLost)
    assert "can't be reached" in lost.reason


def test_a_host_with_another_secret_is_lost(meeting: Meeting) -> None:
    a, b = meeting.prepare(2, secrets=[SECRET, b"another"])
    a._thread.start()
    b.connect(PATIENCE)
    lost = take(b)
    assert isinstance(lost, HostLost)
    assert lost.reason.endswith("The other agent hung up: the two may not have the same secret")


def test_an_agent_that_says_nothing_is_lost_at_last(meeting: Meeting) -> None:
    """Its machine answers: it may be busy, and has more time than a machine that does not."""
    a, _ = meeting.prepare(2, silence=1.0)
    a._thread.start()
    with socket.create_connection((a.all[0].address, a.all[0].port)) as silent:
        greeting = silent.recv(100)
        ours = bytes(32)
        proof = link._proof(SECRET, b"caller", greeting[8:], ours)
        silent.sendall(ours + proof + link.encode({"type": "calls", "host": 1}))
        assert take(a) == HostLost(1, "its agent has said nothing for 6 s")


def test_an_agent_that_was_held_up_itself_takes_no_other_for_silent(meeting: Meeting) -> None:
    """A save, or a busy machine, holds its threads up for longer than the others may be silent."""
    a, b = meeting.prepare(2)
    a._silence, a._patience = 0.5, 0.5 * connections.PATIENCE
    b._silence = a._silence  # so often it says that it lives
    b._thread.start()
    a.connect(PATIENCE)
    held_up = threading.Event()

    def hold_up() -> None:
        held_up.set()
        time.sleep(2 * a._patience)

    a._in_loop(hold_up)
    assert held_up.wait(PATIENCE)
    b.send(0, TakesIn("still here"))
    assert take(a) == Arrived(1, TakesIn("still here"))


def test_who_is_called_waits_no_longer_than_the_caller_lives(meeting: Meeting) -> None:
    """It has met the others, and dies before it calls: nobody listens there any more."""
    a, b = meeting.prepare(2)
    b.close()
    meeting.hosts.remove(b)
    a.connect(PATIENCE)
    lost = take(a)
    assert isinstance(lost, HostLost)
    assert "can't be reached" in lost.reason


def test_who_is_called_waits_for_a_busy_caller(meeting: Meeting) -> None:
    """Its machine accepts connections, though the agent says nothing yet: no limit but that of `connect`."""
    a, b = meeting.prepare(2)
    a._silence = 0.5
    a._thread.start()
    time.sleep(2)
    b.connect(PATIENCE)
    b.send(0, TakesIn("at last"))
    assert take(a) == Arrived(1, TakesIn("at last"))


def test_who_sends_is_told_when_the_other_has_it(meeting: Meeting) -> None:
    a, b = meeting.meet(2)
    has_it, nobody_answers, is_lost = threading.Event(), threading.Event(), threading.Event()
    a.send(1, TakesIn("a piece"))
    a.confirm(1, has_it.set)
    assert has_it.wait(PATIENCE)
    assert take(b) == Arrived(0, TakesIn("a piece")), "it had come by then"
    b._in_loop(b._closing.set)  # it reads nothing any more
    a.confirm(1, nobody_answers.set)
    b.close()
    meeting.hosts.remove(b)
    assert nobody_answers.wait(PATIENCE)
    assert isinstance(take(a), HostLost)
    a.confirm(1, is_lost.set)
    assert is_lost.wait(PATIENCE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_nonsense_from_another_host_ends_no_connection(meeting: Meeting) -> None:
    a, b = meeting.meet(2)

    @settings(max_examples=50, deadline=None)
    @given(st.sampled_from(["received", "receipt", "alive", "calls", "visits"]), json_values, st.booleans())
    def say(key: str, value: Any, known: bool) -> None:
        b._in_loop(b._write, (0,), link.encode({"type": key, "number": value} if known else {key: value}))
        b.send(0, TakesIn("still here"))
        while (said := a.take()) == [] or said[-1] != Arrived(1, TakesIn("still here")):
            assert not any(isinstance(one, HostLost) for one in said)
            assert said or select.select([a.wake], [], [], PATIENCE)[0]

    say()
    has_it = threading.Event()
    a.confirm(1, has_it.set)
    assert has_it.wait(PATIENCE)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({}, "A message has the unknown type None; known are calls, visits."),
        ({"host": 1}, "A message has the unknown type None; known are calls, visits."),
        ({"type": "calls", "host": [1]}, "In a message of type calls, host can't be [1]."),
        ({"type": "visits", "what": {}}, "In a message of type visits, what can't be {}."),
        ({"type": "visits"}, "A message of type visits lacks what."),
    ],
)
def test_who_says_nonsense_first_is_not_heard(
    meeting: Meeting, capsys: pytest.CaptureFixture[str], header: dict[str, Any], why: str
) -> None:
    a, b = meeting.meet(2)
    with socket.create_connection((a.all[0].address, a.all[0].port), PATIENCE) as caller:
        greeting = caller.recv(40, socket.MSG_WAITALL)
        proof = link._proof(SECRET, b"caller", greeting[8:], bytes(32))
        caller.sendall(bytes(32) + proof + link.encode(header))
        assert len(caller.recv(32, socket.MSG_WAITALL)) == 32
        assert caller.recv(1) == b""
    b.send(0, TakesIn("still here"))
    assert take(a) == Arrived(1, TakesIn("still here"))
    assert f"an agent that calls says what makes no sense, and is not heard: {why}" in capsys.readouterr().err


def test_what_nobody_foresaw_in_a_visit_is_a_line_and_no_traceback(
    meeting: Meeting, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would write one on the connections' thread: with stderr full the host would fall silent."""
    a, b = meeting.meet(2)

    async def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    async def ask() -> bytes:
        async with b.visit(0, "something") as (reader, _):
            return await reader.read()

    a.answers["something"] = fail
    assert asyncio.run(ask()) == b""
    b.send(0, TakesIn("still here"))
    assert take(a) == Arrived(1, TakesIn("still here"))
    said = "what another agent asked for has failed: RuntimeError('out of order')"
    assert said in capsys.readouterr().err
    assert caplog.records == []


def test_strangers_and_impostors_change_nothing(meeting: Meeting) -> None:
    a, b = meeting.meet(2)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000)):
        with socket.create_connection((a.all[0].address, a.all[0].port)) as stranger:
            stranger.sendall(garbage)
    twice = Hosts(1, a.all, connections.listen("127.0.0.1"), SECRET, PATIENCE)
    twice.connect(PATIENCE)
    assert isinstance(take(twice), HostLost)
    twice.close()
    b.send(0, TakesIn("still here"))
    assert take(a) == Arrived(1, TakesIn("still here"))


def test_a_crowd_of_strangers_keeps_nobody_out(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_STRANGERS", 16)
    a, b = meeting.prepare(2)
    a._thread.start()
    crowd = [socket.create_connection((a.all[0].address, a.all[0].port), PATIENCE) for _ in range(200)]
    b.connect(PATIENCE)
    b.send(0, TakesIn("still here"))
    assert take(a) == Arrived(1, TakesIn("still here"))
    assert len(a._strangers) <= 16
    for stranger in crowd:
        stranger.close()
