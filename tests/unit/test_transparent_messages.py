"""The messages between the agent and the device proxies: what is sent arrives, what is damaged is refused."""

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.wire import proxy_messages
from jitckpt.wire.communicators import EVERYBODY, FOREVER, Count, Membership
from jitckpt.wire.proxy_messages import (
    HEALTHY,
    MAX_BYTES,
    Alarm,
    Ask,
    Done,
    GiveUp,
    GoOn,
    Held,
    Hello,
    HostCopy,
    Id,
    Ids,
    Making,
    MessageError,
    Replay,
    Rest,
    Restart,
    Settle,
    Settled,
    Standing,
    Stop,
    Stopped,
    Validated,
    Validates,
    decode,
    encode,
)

u64, u32 = st.integers(0, FOREVER), st.integers(0, (1 << 32) - 1)
i32 = st.integers(-(1 << 31), (1 << 31) - 1)
keys = st.binary(min_size=16, max_size=16).map(lambda key: key.hex() if any(key) else "")
texts = st.text(st.characters(codec="utf-8"), max_size=100)
numbers = st.tuples(u64, u64)
ids = st.lists(st.builds(Id, keys, st.binary(min_size=128, max_size=128)), max_size=4).map(tuple)
counts = st.lists(st.builds(Count, u64, i32, u64, u64), max_size=3).map(tuple)
places = st.lists(st.builds(Membership, keys, keys, u32, i32, u32, u64, u64, counts), max_size=4).map(tuple)
copies = st.lists(st.builds(HostCopy, i32, i32, i32, u64, u64, u64), max_size=1).map(tuple)
makings = st.lists(st.builds(Making, keys, u32, keys), max_size=4).map(tuple)
MESSAGES: st.SearchStrategy[Any] = st.one_of(
    st.builds(Hello, numbers, i32, i32, texts),
    st.builds(Alarm, numbers, u64, texts),
    st.builds(Held, numbers),
    st.builds(Stopped, numbers, *[u64] * 10, texts, places),
    st.builds(Ids, numbers, ids, u64, u64, u64, copies),
    st.builds(Done, numbers, u64, u64, u64, u64, u64, u64),
    st.builds(Standing, numbers, u64, u64, places),
    st.builds(Settled, numbers, u64, texts),
    st.builds(Settle, numbers),
    st.builds(GoOn, numbers),
    st.builds(Ask, numbers),
    st.builds(Stop, numbers),
    st.builds(Rest, numbers),
    st.builds(Restart, numbers, u64, u64, u64),
    st.builds(Replay, numbers, u64, u64, u64, u64, copies, ids, makings),
    st.builds(GiveUp, numbers, texts),
    st.builds(Validates, numbers, u64, u64, texts, texts, texts),
    st.builds(Validated, numbers, u64, u64),
)


@given(MESSAGES)
def test_what_is_sent_arrives(message: Any) -> None:
    assert decode(encode(message)) == message


@given(MESSAGES, st.data())
def test_what_is_damaged_is_refused_or_is_another_message(message: Any, data: st.DataObject) -> None:
    sent = bytearray(encode(message))
    place = data.draw(st.integers(0, len(sent) - 1))
    sent[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MessageError):
        assert encode(decode(bytes(sent)))


@given(MESSAGES, st.data())
def test_a_part_of_a_message_is_none(message: Any, data: st.DataObject) -> None:
    sent = encode(message)
    with pytest.raises(MessageError, match="ends too early"):
        decode(sent[: data.draw(st.integers(0, len(sent) - 1))])
    with pytest.raises(MessageError, match="1 bytes too many"):
        decode(sent + b"\0")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(data: bytes) -> None:
    try:
        decode(data)
    except MessageError:
        return


def test_the_bytes_are_those_that_the_other_side_writes() -> None:
    hello = struct.pack("<IIQQ", 1, 13, 0, 7) + struct.pack("<iiI", 300, 2, 2) + b"ab"
    assert decode(hello) == Hello((0, 7), 300, 2, "ab")
    done = struct.pack("<IIQQ", 5, 13, 0, 7) + struct.pack("<QQQQQQ", 10, 20, 30, 40, 50, 60)
    assert decode(done) == Done((0, 7), 10, 20, 30, 40, log_bytes=50, image_bytes=60)
    key, parent = bytes(range(16)), bytes(16)
    stopped = struct.pack("<IIQQ", 3, 13, 0, 1)
    stopped += struct.pack("<10QI", 4, 5, 1, 2, 1, 5, 5, 6, 90, 80, 4) + b"lost"
    stopped += struct.pack("<I", 1) + key + parent + struct.pack("<IiIQQ", 0, 1, 2, 1, FOREVER)
    stopped += struct.pack("<IQiQQ", 1, 4, -1, 70, 0)
    stopped += struct.pack("<Q", 4)
    place = Membership(key.hex(), "", 0, 1, 2, 1, FOREVER, (Count(4, EVERYBODY, 70, 0),))
    assert decode(stopped) == Stopped(
        (0, 1), 4, 5, 1, 2, HEALTHY, 5, 5, 6, 90, 80, "lost", (place,), outgrown=4
    )
    replay = struct.pack("<IIQQ", 18, 13, 0, 1) + struct.pack("<QQQQI", 5, 1, 0, 1, 1)
    replay += struct.pack("<iiiQQQII", 3, 9, 8, 4096, 100, 77, 0, 1)
    replay += parent + b"\3\0\0\0" + key
    assert (
        encode(
            Replay((0, 1), 5, 1, 0, 1, (HostCopy(3, 9, 8, 4096, 100, 77),), (), (Making("", 3, key.hex()),))
        )
        == replay
    )


def test_what_cant_be_sent_is_refused_by_name() -> None:
    with pytest.raises(MessageError, match="message Done can't be sent"):
        encode(Done((0, 1), -1, 0, 0, 0, 0, 0))
    with pytest.raises(MessageError, match="id has 3 bytes in place of 128"):
        encode(Ids((0, 1), (Id("", b"abc"),), 0, 0, 0))
    with pytest.raises(MessageError, match="'abc' is no key"):
        encode(Ids((0, 1), (Id("abc", bytes(128)),), 0, 0, 0))
    with pytest.raises(MessageError, match=f"at most {MAX_BYTES} can be sent"):
        encode(Replay((0, 1), 1, 0, 0, 0, (), (Id("", bytes(128)),) * 1000, ()))
    assert decode(encode(GiveUp((0, 1), "é" * 5000))).reason == "é" * (proxy_messages.MAX_TEXT // 2)  # type: ignore[union-attr]


def test_another_version_is_named() -> None:
    with pytest.raises(MessageError, match="version 1 of its messages, this agent 13: install jitckpt again"):
        decode(struct.pack("<IIQQ", 16, 1, 0, 1))
    with pytest.raises(MessageError, match="unknown kind 10"):
        decode(struct.pack("<IIQQ", 10, 13, 0, 1))
