"""The connections between agents: who is let in, and what becomes of garbage."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.hosts import link
from jitckpt.hosts.link import LinkError

SECRET = b"what only this job's agents know"

Side = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


def talk(called: Side, caller: Side) -> list[Any]:
    """Let two ends of a connection meet; return what each returned or raised."""

    async def both() -> list[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                answer.set_result(await called(reader, writer))
            except BaseException as error:
                answer.set_result(error)
            finally:
                writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                told: Any = await caller(reader, writer)
            except LinkError as error:
                told = error
            finally:
                writer.close()
            return [await answer, told]

    return asyncio.run(asyncio.wait_for(both(), 60))


def admit(secret: bytes = SECRET) -> Side:
    return lambda reader, writer: link.admit(reader, writer, secret)


def introduce(secret: bytes = SECRET) -> Side:
    return lambda reader, writer: link.introduce(reader, writer, secret)


def send(data: bytes) -> Side:
    async def sending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    return sending


def test_two_that_know_the_secret_let_each_other_in() -> None:
    assert talk(admit(), introduce()) == [None, None]


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    called, caller = talk(admit(), introduce(b"another"))
    assert str(called) == "Who called did not prove that it knows this job's secret."
    assert str(caller) == "The other agent hung up: the two may not have the same secret."


def test_who_only_plays_an_agent_does_not_get_away_with_the_callers_own_proof() -> None:
    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(link.GREETING + bytes(32))
        writer.write((await reader.readexactly(64))[32:])

    _, caller = talk(mirror, introduce())
    assert str(caller) == "Who was called did not prove that it knows this job's secret."


@given(st.binary(max_size=200))
def test_garbage_is_not_let_in(garbage: bytes) -> None:
    called, _ = talk(admit(), send(garbage))
    assert isinstance(called, LinkError)


def test_another_service_is_no_agent() -> None:
    _, caller = talk(send(b"HTTP/1.1 400 Bad Request\r\n"), introduce())
    assert str(caller) == "What answers there is no agent of jitckpt."


def receive(data: bytes) -> tuple[dict[str, Any], bytes]:
    async def receiving() -> tuple[dict[str, Any], bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await link.receive(reader)

    coroutine: Coroutine[Any, Any, tuple[dict[str, Any], bytes]] = receiving()
    return asyncio.run(coroutine)


headers = st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.booleans()))


@given(headers, st.binary())
def test_a_message_arrives_as_it_was_sent(header: dict[str, Any], data: bytes) -> None:
    assert receive(link.encode(header, data) + b"more") == (header, data)


@given(st.data())
def test_a_cut_connection_is_the_end(data: st.DataObject) -> None:
    message = link.encode({"a": 1}, b"state")
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(LinkError, match="The connection has ended"):
        receive(message[:cut])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff" * 8, "no message of an agent"),
        (b"\0\0\0\3\0\0\0\0{a}", "not JSON"),
        (b"\0\0\0\1\0\0\0\0[", "not JSON"),
        (b"\0\0\0\2\0\0\0\0[]", "no JSON object"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(LinkError, match=why):
        receive(data)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(LinkError, match="may be sent"):
        link.encode({"a": "b" * link.MAX_HEADER})
