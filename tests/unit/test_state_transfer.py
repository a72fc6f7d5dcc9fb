"""A copy of a rank's state comes to another host as it is, or not at all."""

import asyncio
import errno
import os
import select
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from descriptors import held_descriptors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jitckpt.agent.proxies import state_transfer
from jitckpt.agent.proxies.state_transfer import PIECE, Ready, Transfers
from jitckpt.hosts import connections, link, visiting
from jitckpt.hosts.connections import Hosts
from jitckpt.wire.hosts import Host
from jitckpt.wire.proxy_messages import HostCopy, Replay
from jitckpt.wire.visits import CopyPiece

SECRET = b"a secret that both agents know.."
OFFSET = 4096
RECOVERY = (0, 3)


@pytest.fixture
def met() -> Iterator[list[Hosts]]:
    listeners = [connections.listen("127.0.0.1") for _ in range(2)]
    known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
    found = [Hosts(i, known, one, SECRET, 60) for i, one in enumerate(listeners)]
    found[1]._thread.start()
    found[0].connect(60)
    yield found
    for host in found:
        host.close()


@pytest.fixture
def transfers(met: list[Hosts]) -> Iterator[list[Transfers]]:
    found = [Transfers(one) for one in met]
    yield found
    for one in found:
        one.close()


def copied(content: bytes) -> tuple[int, HostCopy]:
    """What rank 0 would tell of a copy in a file of its own."""
    file = os.memfd_create("pinned")
    os.pwrite(file, content, OFFSET)
    return file, HostCopy(0, os.getpid(), file, OFFSET, len(content), 77)


def order_of(copy: HostCopy) -> Replay:
    return Replay(RECOVERY, 5, 0, 0, 0, (copy,), (), ())


def one_ready(of: Transfers) -> Ready:
    assert select.select([of.wake], [], [], 60)[0], "nothing has come"
    (ready,) = of.take()
    return ready


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.sampled_from([1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 100]), seed=st.integers(0, 255))
def test_a_copy_comes_whole(transfers: list[Transfers], size: int, seed: int) -> None:
    content = bytes([seed, 255 - seed, 7]) * (size // 3 + 1)
    file, copy = copied(content[:size])
    try:
        transfers[0].offer(RECOVERY, copy)
        transfers[1].begin(1, order_of(copy))
        ready = one_ready(transfers[1])
        assert not ready.failed
        (own,) = ready.order.source
        assert ready.order == replace(order_of(copy), source=(own,))
        assert (own.rank, own.process, own.offset, own.digest) == (0, os.getpid(), 0, 77)
        assert os.pread(own.file, size + 1, 0) == content[:size]
    finally:
        os.close(file)


def test_what_is_no_more_or_of_another_recovery_is_not_given(transfers: list[Transfers]) -> None:
    file, copy = copied(b"state")
    transfers[1].begin(1, order_of(copy))
    assert "rank 0's state could not be fetched" in one_ready(transfers[1]).failed
    transfers[0].offer((0, 4), copy)
    transfers[1].begin(1, order_of(copy))
    assert "There is a copy for recovery (0, 4), not for (0, 3)" in one_ready(transfers[1]).failed
    with subprocess.Popen(["true"]) as ended:
        pass
    transfers[0].offer(RECOVERY, replace(copy, process=ended.pid))
    os.close(file)
    transfers[1].begin(1, order_of(copy))
    assert "FileNotFoundError" in one_ready(transfers[1]).failed


@pytest.mark.parametrize("how", ["damaged", "too short", "too long"])
def test_what_comes_otherwise_is_not_taken(
    transfers: list[Transfers], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    file, copy = copied(b"x" * 5000)
    real = state_transfer._piece

    def wrong(file: int, size: int, offset: int) -> bytes:
        sent = real(file, size, offset)
        match how:
            case "damaged":
                return sent[:-1] + b"y"
            case "too short":
                return real(file, size - 1, offset)
            case _:
                return visiting.encode(CopyPiece(state_transfer.checksum(b"z" * 5001)), b"z" * 5001)

    monkeypatch.setattr(state_transfer, "_piece", wrong)
    transfers[0].offer(RECOVERY, copy)
    transfers[1].begin(1, order_of(copy))
    said = {"damaged": "came damaged", "too short": "connection has ended", "too long": "more than the 5000"}
    assert said[how] in one_ready(transfers[1]).failed
    os.close(file)


@pytest.mark.parametrize("nonsense", [{}, {"rank": 0}, {"type": "want_copy", "rank": [], "recovery": [0, 3]}])
def test_a_wish_that_makes_no_sense_is_refused_in_a_sentence(
    met: list[Hosts], transfers: list[Transfers], nonsense: dict[str, Any]
) -> None:
    async def ask() -> None:
        async with met[1].visit(0, state_transfer.VISIT) as (reader, writer):
            writer.write(link.encode(nonsense))
            await visiting.answer(reader, "It", 60.0, CopyPiece)

    with pytest.raises(visiting.RefusedError, match=r"ProtocolError\(.*message.*\.['\"]\)$"):
        asyncio.run(ask())


def test_a_piece_that_makes_no_sense_is_not_taken(
    transfers: list[Transfers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_transfer, "_piece", lambda *_: link.encode({"type": "copy_piece", "sum": 7}))
    file, copy = copied(b"state")
    transfers[0].offer(RECOVERY, copy)
    transfers[1].begin(1, order_of(copy))
    why = "It says what makes no sense: In a message of type copy_piece, sum can't be 7."
    assert why in one_ready(transfers[1]).failed
    os.close(file)


def test_who_is_lost_meanwhile_is_named(met: list[Hosts], transfers: list[Transfers]) -> None:
    del met[0].answers[state_transfer.VISIT]
    file, copy = copied(b"state")
    transfers[1].begin(1, order_of(copy))
    assert "The connection has ended" in one_ready(transfers[1]).failed
    met[0].answers[state_transfer.VISIT] = transfers[0]._serve
    os.close(file)


def test_without_room_for_a_file_the_order_fails(
    transfers: list[Transfers], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, copy = copied(b"state")

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", refused)
        transfers[1].begin(1, order_of(copy))
    assert "no place for the copy of rank 0's state: [Errno 24]" in one_ready(transfers[1]).failed
    os.close(file)


def test_what_is_broken_off_or_over_leaves_nothing(transfers: list[Transfers]) -> None:
    file, copy = copied(b"x" * 9 * PIECE)
    before = held_descriptors()
    transfers[0].offer(RECOVERY, copy)
    transfers[1].begin(1, order_of(copy))
    transfers[1].break_off(1)
    newer = replace(order_of(copy), state=6)
    transfers[1].begin(1, newer)
    ready = one_ready(transfers[1])
    assert ready.order.state == 6  # of the older nothing is told
    assert not transfers[1].take()
    transfers[1].end(1)
    os.close(file)
    for _ in range(200):  # what has been cancelled closes its own
        if held_descriptors() < before:
            return
        select.select([], [], [], 0.05)
    pytest.fail("files are left open")
