"""A thread of its own reads all that is meant for it, no more, and no longer than so long."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.agent.migration.image_receiver import receive_files
from jitckpt.hosts import link, visiting
from jitckpt.hosts.direct import Direct, directly
from jitckpt.hosts.link import LinkError
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.moves import MOST_PACKED, ImageFile, ImagePiece, SamePiece, Whole

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def between(talk: Callable[[Streams, Streams], Awaitable[Any]]) -> Any:
    async def both() -> Any:
        ends = [await asyncio.open_connection(sock=one) for one in socket.socketpair()]
        try:
            async with asyncio.timeout(30):
                return await talk(ends[0], ends[1])
        finally:
            for _, writer in ends:
                writer.close()

    return asyncio.run(both())


def one_message(direct: Direct) -> tuple[dict[str, Any], bytes]:
    header, size = direct.head()
    direct.fill(memoryview(data := bytearray(size)))
    return header, bytes(data)


@pytest.mark.parametrize("first", [0, 3, 8, 20, 100, 300_000])
def test_what_asyncio_has_read_before_comes_first_and_what_follows_is_asyncios(first: int) -> None:
    data = os.urandom(500_000)
    message = link.encode({"number": 1}, data)

    async def talk(here: Streams, there: Streams) -> None:
        there[1].write(message[:first])
        await there[1].drain()
        await asyncio.sleep(0.02)
        taking = asyncio.create_task(directly(*here, 10, one_message))
        await asyncio.sleep(0.02)
        there[1].write(message[first:])
        assert await taking == ({"number": 1}, data)
        there[1].write(link.encode({"number": 2}))
        assert await link.receive(here[0]) == ({"number": 2}, b"")

    between(talk)


def test_who_goes_on_out_of_turn_is_refused() -> None:
    async def talk(here: Streams, there: Streams) -> None:
        there[1].write(link.encode({}) + link.encode({}))
        await asyncio.sleep(0.02)
        await directly(*here, 10, one_message)

    with pytest.raises(LinkError, match="goes on where it should wait"):
        between(talk)


@pytest.mark.parametrize("drops", [False, True])
def test_who_says_nothing_or_a_byte_now_and_then_is_given_up(drops: bool) -> None:
    async def talk(here: Streams, there: Streams) -> None:
        async def drop() -> None:
            while drops:
                there[1].write(b"\0")
                await asyncio.sleep(0.01)

        dropping = asyncio.create_task(drop())
        there[1].write(link.head({}, 1000))
        try:
            await directly(*here, 0.3, one_message)
        finally:
            dropping.cancel()

    with pytest.raises(LinkError, match=r"The other side sends nothing any more, for 0.3 s\."):
        between(talk)


@pytest.mark.parametrize("said", [b"", b"\0\0", link.head({}, 10), link.head({}, 10) + b"12345"])
def test_the_end_of_a_connection_is_a_sentence(said: bytes) -> None:
    async def talk(here: Streams, there: Streams) -> None:
        there[1].write(said)
        there[1].close()
        await directly(*here, 10, one_message)

    with pytest.raises(LinkError, match=r"The connection has ended"):
        between(talk)


def test_who_cancels_waits_for_the_end_of_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(here: Streams, _: Streams) -> None:
        ended: list[LinkError] = []

        def call(direct: Direct) -> None:
            try:
                direct.head()
            except LinkError as error:
                ended.append(error)
                raise

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(directly(*here, 600, call), 0.1)
        assert len(ended) == 1

    between(talk)
    gc.collect()
    assert caplog.text == "", "asyncio says that nobody has asked for an error"


MESSAGES = [
    ImageFile(1, "a", 9000),
    ImageFile(1, "b", 1 << 40),
    ImagePiece(1, "a", 0, "00" * 16, 0),
    ImagePiece(1, "a", 0, "99aa06d3014798d86001c324468d497f", 0),  # of no bytes
    ImagePiece(1, "b", 0, "00", 4096),
    SamePiece(1, "b", 0, 9000, 1, "a", 0),
    SamePiece(1, "a", 10, 8000, 1, "a", 0),
    Whole(),
]
SAID = st.one_of(
    st.binary(max_size=40),
    st.tuples(st.sampled_from(MESSAGES), st.binary(max_size=20)).map(lambda one: visiting.encode(*one)),
)


@settings(deadline=None)
@given(st.lists(SAID, max_size=8))
def test_any_bytes_are_whole_images_or_refused(said: list[bytes]) -> None:
    async def talk(here: Streams, there: Streams) -> None:
        there[1].write(b"".join(said))
        there[1].write_eof()
        with contextlib.suppress(LinkError, ProtocolError):
            await receive_files(*here, lambda _: os.memfd_create("image"), 10)

    between(talk)


def test_a_piece_longer_than_any_is_refused_before_it_comes() -> None:
    async def talk(here: Streams, there: Streams) -> None:
        there[1].write(visiting.encode(ImageFile(1, "a", 1 << 30)))
        there[1].write(visiting.head(ImagePiece(1, "a", 0, "", 0), MOST_PACKED + 1))
        await receive_files(*here, lambda _: os.memfd_create("image"), 10)

    with pytest.raises(LinkError, match="has 4194305 bytes behind it"):
        between(talk)
