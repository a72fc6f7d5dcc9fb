"""What processes of one host tell each other is read as it was written, or refused in a sentence.

Nothing of that ends who reads it.
"""

import json
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_protocol import json_values, values_for

from jitckpt.agent.keeping import KeptMemory
from jitckpt.agent.processes.guardian import Guarded, listen
from jitckpt.system import datagrams
from jitckpt.tiers import host_memory
from jitckpt.tiers.keeper import Keeper
from jitckpt.wire import beside, checked, commands, guardian, keeper, spares
from jitckpt.wire.checked import Checked, ProtocolError
from jitckpt.wire.guardian import Forget, GuardWorker, Images, Locks, SavesItself
from jitckpt.wire.keeper import Busy, Hold, Holds, HoldsNoMore, LetAllGo, LetGo

KINDS: list[Mapping[str, type[Checked]]] = [
    guardian.KINDS,
    *(beside.FROM_COPIER, beside.TO_SERVER),
    *(commands.TO_LAUNCHER, commands.FROM_LAUNCHER),
    *(keeper.TO_KEEPER, keeper.FROM_KEEPER),
    *(spares.TO_SPARE, spares.FROM_SPARE),
]
LIMIT = 60.0
JOB = f"test_datagrams {os.getpid()}"
Ends = tuple[socket.socket, socket.socket]
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def of_a_kind(kinds: Mapping[str, type[Checked]]) -> st.SearchStrategy[Checked]:
    return st.one_of(
        [
            st.builds(kind, **{one.name: values_for(checked.hints(kind)[one.name]) for one in fields(kind)})
            for kind in kinds.values()
        ]
    ).filter(lambda message: message.problem() is None)


def nearly_of_a_kind(kinds: Mapping[str, type[Checked]]) -> st.SearchStrategy[bytes]:
    """What is a message but for parts of it, or anything at all."""
    contents: list[st.SearchStrategy[Any]] = [json_values]
    for kind in kinds.values():
        values = {one.name: values_for(checked.hints(kind)[one.name]) | json_values for one in fields(kind)}
        contents.append(st.fixed_dictionaries({"type": st.just(kind.type)}, optional=values))
    as_json = st.one_of(contents).map(lambda content: json.dumps(content, default=asdict).encode())
    return as_json | st.binary(min_size=1, max_size=30)


@pytest.mark.parametrize("kinds", KINDS)
@shared
@given(data=st.data())
def test_what_is_sent_is_received(
    ends: Ends, kinds: Mapping[str, type[Checked]], data: st.DataObject
) -> None:
    message = data.draw(of_a_kind(kinds))
    datagrams.send(ends[0], message)
    assert datagrams.receive(ends[1], kinds) == (message, [])


@pytest.mark.parametrize("kinds", KINDS)
@shared
@given(data=st.data())
def test_anything_is_a_message_or_refused_in_a_sentence(
    ends: Ends, kinds: Mapping[str, type[Checked]], data: st.DataObject
) -> None:
    ends[0].send(data.draw(nearly_of_a_kind(kinds)))
    heard, refused = None, ""
    try:
        heard = datagrams.receive(ends[1], kinds)
    except ProtocolError as error:
        refused = str(error)
    if heard is None:
        assert re.fullmatch(r"(A|In a) message .*\.", refused, re.DOTALL)
    else:
        datagrams.send(ends[0], heard[0])  # each field is of its type, so that it can be sent on
        assert datagrams.receive(ends[1], kinds) == heard


def test_descriptors_come_with_their_message_and_go_with_one_that_is_refused(ends: Ends) -> None:
    read, write = os.pipe()
    datagrams.send(ends[0], GuardWorker(7), [write])
    heard = datagrams.receive(ends[1], guardian.KINDS, 1)
    assert heard is not None
    message, (copy,) = heard
    assert (message, os.get_inheritable(copy)) == (GuardWorker(7), False)
    datagrams.send(ends[0], Images("nobody knows"), [copy])
    os.close(write)
    os.close(copy)
    with pytest.raises(ProtocolError, match="unknown type"):
        datagrams.receive(ends[1], {}, 1)
    assert os.read(read, 1) == b"", "nobody has the other end any more"
    os.close(read)


def test_the_end_of_a_connection_is_no_message(ends: Ends) -> None:
    ends[1].send(b"{}")
    ends[0].close()  # with something unread
    assert datagrams.receive(ends[1], guardian.KINDS) is None


def test_a_message_that_is_too_long_is_refused_on_both_sides(ends: Ends) -> None:
    with pytest.raises(ProtocolError, match="at most 131072 can be sent"):
        datagrams.send(ends[0], Images("x" * datagrams.MOST_BYTES))
    ends[0].send(b" " * (datagrams.MOST_BYTES + 2))
    with pytest.raises(ProtocolError, match="at most 131072 are allowed"):
        datagrams.receive(ends[1], guardian.KINDS)


# The guardian.


def test_a_guardian_goes_by_what_it_was_told_last(ends: Ends) -> None:
    pidfds = [os.pidfd_open(os.getpid()) for _ in range(2)]
    for pid, pidfd in enumerate(pidfds):
        datagrams.send(ends[0], GuardWorker(pid), [pidfd])
        os.close(pidfd)
    for message in (
        SavesItself(1),
        Forget(0),
        SavesItself(0),
        Locks(["one"]),
        Images("folder"),
        GuardWorker(2),
    ):
        datagrams.send(ends[0], message)
    ends[0].close()
    guarded, locks, images = listen(ends[1])
    assert guarded == {1: Guarded(1, guarded[1].pidfd, registered=True)}
    assert (locks, images) == ({"one"}, "folder")
    os.close(guarded[1].pidfd)


def test_a_guardian_lives_on_with_what_it_knew_whatever_it_is_told(
    ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    datagrams.send(ends[0], GuardWorker(1, registered=True), [0])
    datagrams.send(ends[0], Locks(["one"]))
    for nonsense in (
        b"no JSON",
        b"[]",
        b'{"guard": 7}',
        b'{"type": "guard", "pid": "7"}',
        b'{"type": "forget", "pid": [1]}',
        b'{"type": "locks", "names": 7}',
        b'{"type": "images", "folder": null}',
    ):
        ends[0].send(nonsense)
    ends[0].close()
    guarded, locks, images = listen(ends[1])
    assert (list(guarded), locks, images) == ([1], {"one"}, "")
    os.close(guarded[1].pidfd)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 7
    assert "jitckpt: the agent tells its guardian what makes no sense: A message is not JSON" in said[0]
    assert "In a message of type locks, names can't be 7." in said[5]


# The keeper of memory.


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return a socket that a keeper listens at, under the first of the names for this test's job."""
    monkeypatch.setattr("jitckpt.agent.keeping.ANSWER_SECONDS", LIMIT)
    alone = KeptMemory(JOB, 0, start=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(alone._names[0])
        listener.listen()
        yield listener


def connected(listener: socket.socket) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(LIMIT)
    one.connect(listener.getsockname())
    return one


def held(agent: socket.socket) -> list[int]:
    """Return the ranks whose memfds have come."""
    ranks = []
    while (heard := datagrams.receive(agent, keeper.FROM_KEEPER, 1)) is not None:
        match heard:
            case Holds(rank), [descriptor]:
                ranks.append(rank)
                os.close(descriptor)
            case _:
                assert heard == (HoldsNoMore(), [])
                break
    return ranks


def test_a_keeper_hangs_up_on_nonsense_and_holds_on(listener: socket.socket) -> None:
    keeps = threading.Thread(target=Keeper(listener, LIMIT).run)
    keeps.start()
    with connected(listener) as agent:
        assert held(agent) == []
        for rank in (1, 2, 3):
            datagrams.send(agent, Hold(rank), [0])
        datagrams.send(agent, LetGo(2))
        datagrams.send(agent, Hold(4))  # and nothing with it
    for nonsense in (
        b"no JSON",
        b"[]",
        b'{"hold": 7}',
        b'{"type": "hold", "rank": "7"}',
        b'{"type": "drop"}',
    ):
        with connected(listener) as agent:
            assert held(agent) == [1, 3]
            agent.send(nonsense)
            assert agent.recv(1) == b""
    with connected(listener) as agent, connected(listener) as other:
        assert held(agent) == [1, 3]
        assert datagrams.receive(other, keeper.FROM_KEEPER) == (Busy(), [])
        datagrams.send(agent, LetAllGo())
        keeps.join(LIMIT)
    assert not keeps.is_alive()


@pytest.mark.parametrize(
    "nonsense", [b"no JSON", b'{"rank": 0}', b'{"type": "holds", "rank": null}', b'{"type": "busy"}']
)
def test_what_is_no_keeper_is_passed_over(listener: socket.socket, nonsense: bytes) -> None:
    def play() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.send(nonsense)

    played = threading.Thread(target=play)
    played.start()
    memory = KeptMemory(JOB, LIMIT)
    played.join(LIMIT)
    assert memory._socket.getpeername() == memory._names[1].encode()
    descriptor = host_memory.create()
    memory.hold(0, descriptor)
    memory.close(end=True)
    os.close(descriptor)
