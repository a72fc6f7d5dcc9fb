"""Images of processes go packed where the link is slower than the compressor."""

import asyncio
import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.agent.migration import packing
from jitckpt.agent.migration.image_transfer import PIECE, send_file
from jitckpt.agent.migration.packing import FASTEST, KNOWN, Packer, Worth
from jitckpt.agent.standby import _receive_files
from jitckpt.hosts import visiting
from jitckpt.hosts.link import LinkError
from jitckpt.wire.moves import Whole

zstandard = pytest.importorskip("zstandard")


def due(link: float, packer: float, left: float, pieces: int) -> list[bool]:
    """Return which of so many pieces are packed. link, packer: bytes a second. left: of each byte."""
    worth, found = Worth(), []
    worth.was_sent(KNOWN, KNOWN / link)
    for _ in range(pieces):
        found.append(is_due := worth.is_due())
        if is_due:
            worth.was_packed(PIECE, int(left * PIECE), PIECE / packer)
        worth.was_sent(PIECE, PIECE / link)
    return found


def test_all_pieces_are_packed_on_a_slow_link() -> None:
    assert all(due(link=1e8, packer=4e8, left=0.3, pieces=50))


@pytest.mark.parametrize(("link", "left"), [(8e8, 0.3), (1e8, 0.97)])
def test_where_it_does_not_pay_it_is_tried_ever_less_often(link: float, left: float) -> None:
    tried = due(link, packer=4e8, left=left, pieces=1000)
    assert tried[0]
    assert sum(tried) <= 10
    assert not any(tried[-400:])


def test_on_a_fast_link_it_is_not_tried() -> None:
    assert not any(due(link=2 * FASTEST, packer=4e8, left=0.3, pieces=100))


def test_nothing_is_packed_until_the_link_is_known() -> None:
    worth = Worth()
    worth.was_sent(KNOWN - 1, 10.0)
    assert not worth.is_due()


def test_a_link_that_has_become_slow_is_noticed() -> None:
    worth = Worth()
    worth.was_sent(KNOWN, KNOWN / 8e8)
    found = []
    for _ in range(300):
        found.append(is_due := worth.is_due())
        if is_due:
            worth.was_packed(PIECE, PIECE // 3, PIECE / 4e8)
        worth.was_sent(PIECE, PIECE / 5e7)
    assert all(found[-100:])


def test_packed_images_come_as_they_went(tmp_path: Path) -> None:
    content = os.urandom(1000) + b"pages of a process" * 600_000 + os.urandom(PIECE)
    (tmp_path / "pages-1.img").write_bytes(content)
    (there := tmp_path / "there").mkdir()
    rank: Any = SimpleNamespace(images=os.open(there, os.O_RDONLY), ring=-1)
    packer = Packer(can_pack=True)
    packer.worth.was_sent(KNOWN, KNOWN / 1.0)  # a byte a second

    async def both() -> int:
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _receive_files(reader, writer, {1: rank}, 60)
            came.set_result(None)
            writer.close()

        server = await asyncio.start_server(called, "127.0.0.1")
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with (tmp_path / "pages-1.img").open("rb") as file:
                size = await send_file(writer, 1, "pages-1.img", file.fileno(), packer)
            writer.write(visiting.encode(Whole()))
            await asyncio.wait_for(came, 60)
            writer.close()
        return size

    assert asyncio.run(both()) == len(content)
    os.close(rank.images)
    assert (there / "pages-1.img").read_bytes() == content
    assert PIECE < packer.saved < len(content) - PIECE  # what is noise went as it is


@pytest.mark.parametrize(
    ("data", "size", "why"),
    [
        (b"no frame", 8, "came damaged"),
        (b"", 8, "came damaged"),
        (zstandard.compress(b"x" * 100), 99, "does not say that it has 99 bytes"),
        (zstandard.compress(b"\0" * (1 << 28)), PIECE, "does not say that it has"),
        (zstandard.compress(b"x" * 100)[:-5], 100, "came damaged"),
    ],
)
def test_what_is_not_what_it_says_is_refused(data: bytes, size: int, why: str) -> None:
    with pytest.raises(LinkError, match=why):
        packing.unpack(data, size)


@given(st.binary(max_size=200), st.integers(1, 300))
def test_any_bytes_are_refused_or_have_the_size(data: bytes, size: int) -> None:
    with contextlib.suppress(LinkError):
        assert len(packing.unpack(data, size)) == size


def test_without_the_package_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "can_pack", lambda: False)
    with pytest.raises(LinkError, match="the package zstandard is not here"):
        packing.unpack(zstandard.compress(b"x"), 1)


def test_a_side_that_hangs_up_is_an_error_of_the_connection(tmp_path: Path) -> None:
    """It is refused for a reason that was said before, and must not be taken for an error of the program."""
    (tmp_path / "pages").write_bytes(os.urandom(4 * PIECE))

    async def send() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with (tmp_path / "pages").open("rb") as file:
                writer.transport.abort()
                with pytest.raises(OSError, match="closing"):
                    await send_file(writer, 1, "pages-1.img", file.fileno(), Packer(False))

    asyncio.run(send())
