"""When the network is idle, by the device's times of the collectives, and what is sent then."""

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jitckpt._memory_tier import Pace
from jitckpt.agent.pacer import Pacer
from jitckpt.agent.sending import MOST_WAITS, MemorySnapshot, Sending
from jitckpt.decisions import idle_time
from jitckpt.decisions.idle_time import CAUTION, LATENCY_SECONDS, MOST_SPANS, Idle, Minibatch
from jitckpt.decisions.pace import SHARE
from jitckpt.decisions.snapshot_spans import Mark, Profiled
from jitckpt.decisions.traffic import Span
from jitckpt.events import EventLog
from jitckpt.tiers import chunks, host_memory
from jitckpt.tiers import idle as idle_profile
from jitckpt.tiers.host_memory import AWAITED, NETWORK_USED, SENDING
from jitckpt.worker.saving.network import minibatches_in

MINIBATCH: Minibatch = (1.0, [(0.1, 0.2), (0.15, 0.3), (0.6, 0.9)])


def test_what_the_library_writes_is_read() -> None:
    first = [1.0, 2, 0.1, 0.2, 0, 0.5, 0.6, 1, 3, 0.1, 0, 0.4, 1, 0.9, 3]
    assert minibatches_in([*first, 2.0, 0, 0, 3.0, 1, 0.3, 0.4, 0, 0]) == [
        Profiled(
            1.0,
            [(0.1, 0.2)],
            [(0.5, 0.6)],
            [(0.1, Mark.COLLECTIVE), (0.4, Mark.WAIT_BEGINS), (0.9, Mark.STEP_BEGINS)],
        ),
        Profiled(2.0, [], [], []),
        Profiled(3.0, [(0.3, 0.4)], [], []),
    ]
    assert minibatches_in([]) == []


def test_idle_is_what_lies_between_collectives() -> None:
    found = idle_time.idle([MINIBATCH] * 5)
    assert found is not None
    assert found.seconds == 1.0
    spans = [(span.start_seconds, span.end_seconds) for span in found.spans]
    assert spans == [pytest.approx(pair) for pair in [(0.0, 0.1), (0.3, 0.6), (0.9, 1.0)]]
    assert found.idle_seconds == pytest.approx(0.5)


def test_a_minibatch_with_an_evaluation_is_left_out() -> None:
    evaluation: Minibatch = (9.0, [(0.1, 0.2)] * 50)
    found = idle_time.idle([*[MINIBATCH] * 6, evaluation])
    assert found is not None
    assert found.seconds == 1.0
    assert idle_time.idle([(1.0, [(0.1, 0.2)] * count) for count in range(20)]) is None
    assert idle_time.idle([(0.0, [])] * 20) is None
    assert idle_time.idle([]) is None


def test_of_several_ranks_it_is_idle_when_all_are() -> None:
    one = Idle(1.0, (Span(0.0, 0.4), Span(0.6, 0.4)))
    other = Idle(1.1, (Span(0.3, 0.5),))
    found = idle_time.common([one, other])
    assert found.seconds == 1.1
    assert [(span.start_seconds, span.end_seconds) for span in found.spans] == [
        pytest.approx(pair) for pair in [(0.3, 0.4), (0.6, 0.8)]
    ]


minibatches = st.builds(
    lambda gaps: (sum(map(sum, gaps)) + 0.01, _intervals(gaps)),
    st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0.001, 0.3)), min_size=1, max_size=8),
)


def _intervals(gaps: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return collectives, of which each follows the one before after a gap."""
    at, found = 0.0, []
    for gap, length in gaps:
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found


@given(
    minibatches,
    st.floats(1e3, 1e8),
    st.integers(1, 4),
    st.floats(0, 0.5),
    st.floats(1e6, 1e9),
)
def test_slots_lie_in_idle_spans_and_carry_all(
    minibatch: Minibatch, size: float, every: int, copied: float, rate: float
) -> None:
    found = idle_time.idle([minibatch] * 5)
    assert found is not None
    planned = idle_time.plan(found, size, every, copied, rate)
    if planned is None:
        return
    busy = minibatch[1]
    free = 0.0
    for begin, end, count in planned.slots:
        assert begin >= free - 1e-9, "one after the other"
        free = begin + (count - 1) / rate
        assert free <= end + 1e-6
        assert all(end <= since + 1e-6 or begin >= until - 1e-6 for since, until in busy)
        if every == 1:
            assert copied - 1e-9 <= begin
            assert end <= SHARE * found.seconds + 1e-6
    needed = size / max(1.0, every - copied / found.seconds)
    assert sum(count for *_, count in planned.slots) >= needed - len(planned.slots)


@given(minibatches, st.floats(1e3, 1e8), st.floats(0, 0.5), st.floats(1e6, 1e9))
@example((0.0735, [(0.001, 0.0635)]), 9501.0, 0.5, 1e6)  # copied for several minibatches
def test_so_often_is_the_most_often_that_idle_time_carries(
    minibatch: Minibatch, size: float, copied: float, rate: float
) -> None:
    found = idle_time.idle([minibatch] * 5)
    assert found is not None
    every = idle_time.least_every(found, size, copied, rate)
    fewer = range(1, 40 if every is None else min(every, 40))
    assert not any(idle_time.plan(found, size, one, copied, rate) for one in fewer)
    if every is not None:
        assert idle_time.plan(found, size, every, copied, rate) is not None


def test_where_there_is_no_room_nothing_is_planned() -> None:
    found = idle_time.idle([MINIBATCH] * 5)
    assert found is not None
    assert idle_time.plan(found, 1e6, 1, 0.2, 1e7) is not None
    assert idle_time.plan(found, 1e6, 1, 0.7, 1e7) is None, "copied too late"
    assert idle_time.plan(found, 1e8, 1, 0.0, 1e7) is None
    assert idle_time.plan(found, 1e6, 1, 0.0, 0.0) is None, "how fast the network is, is not known"
    assert idle_time.plan(found, 4e6, 1, 0.0, 1e7) is None
    assert idle_time.plan(found, 4e6, 2, 0.0, 1e7) is not None
    assert CAUTION < 1


def test_it_is_planned_anew_where_spans_have_drifted() -> None:
    before = (Span(0.0, 0.4), Span(0.6, 0.4))
    assert not idle_time.has_drifted(before, (Span(0.0, 0.41), Span(0.6, 0.4)), 20)
    assert idle_time.has_drifted(before, (Span(0.0, 0.3), Span(0.6, 0.4)), 20)
    assert idle_time.has_drifted(before, (Span(0.0, 0.4),), 20)


# What a rank tells its agent, and what that makes of it.


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = host_memory.create()
    yield descriptor
    os.close(descriptor)


def test_a_profile_is_read_as_it_was_written(memory: int) -> None:
    assert idle_profile.of(memory) is None
    found = Idle(1.5, tuple(Span(float(number), 0.5, 0.1) for number in range(MOST_SPANS + 5)))
    idle_profile.put(memory, 1, found)
    assert idle_profile.of(memory) == (1, Idle(1.5, found.spans[:MOST_SPANS]))
    idle_profile.put(memory, 2, Idle(1.0, ()))
    assert idle_profile.of(memory) == (2, Idle(1.0, ()))
    assert host_memory.is_one(memory)
    assert max(host_memory.WORDS) < idle_profile.PLACE
    assert idle_profile.PLACE + idle_profile.SIZE <= host_memory.PAGE


class Paced:
    """What native/memory_tier is told."""

    def __init__(self) -> None:
        self.rate, self.spare = 0.0, 0.0
        self.slots: list[tuple[float, float, int]] = []
        self.heard = 0

    def set_rate(self, bytes_per_second: float, spare: float = 0.0) -> None:
        self.rate, self.spare = bytes_per_second, spare

    def set_schedule(
        self, slots: list[tuple[float, float, int]], minibatch: float, bytes_per_second: float
    ) -> None:
        self.slots = list(slots)

    def listen(self, ranks: list[object], began: int, awaited: int, uses_network: int) -> None:
        self.heard = len(ranks)


def test_idle_spans_are_used_once_they_are_known_and_given_up_if_the_training_waits(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("jitckpt.agent.sending.say", said.append)
    log, pace, pacer = EventLog(), Paced(), Pacer(1)
    log.leading = True
    sending = Sending(pace, [memory], log)  # type: ignore[arg-type]
    assert (pace.rate, pace.heard) == (float("inf"), 1)
    host_memory.put_word(memory, host_memory.STEP_TIME, 1_000_000)
    rank = MemorySnapshot(memory, 1_000_000, 0.2)

    def plan() -> None:
        sending.plan([rank], 1, 1, pacer)

    sending.sent(1, 10.0, 10.1, 1_000_000)
    plan()
    assert pace.rate == pytest.approx(1e6 / 0.6)
    assert pace.spare == pytest.approx(0.1)
    assert pace.slots == []
    found = idle_time.idle([MINIBATCH] * 5)
    assert found is not None
    idle_profile.put(memory, 1, found)
    plan()
    assert pace.slots
    assert pace.slots[0][0] == pytest.approx(0.3)
    assert (
        "in the network's idle spans: in a minibatch of 1 s the network is idle for 0.5 s, in 3" in said[-1]
    )
    for waits in range(1, MOST_WAITS + 1):
        host_memory.put_word(memory, host_memory.WAITED, 100_000 * waits)
        plan()
    assert pace.slots == []
    assert "at a constant rate, since the training had to wait" in said[-1]
    idle_profile.put(memory, 2, found)
    plan()
    assert pace.slots, "it was measured anew"
    idle_profile.put(memory, 3, Idle(1.0, (Span(0.0, LATENCY_SECONDS * 2),)))
    plan()
    assert pace.slots == []
    assert "no room" in said[-1]
    assert [event["event"] for event in log.events] == ["memory_pace"] * 4


def test_ranks_say_that_they_use_the_network_while_something_is_sent(memory: int) -> None:
    sending = Sending(Paced(), [memory], EventLog())  # type: ignore[arg-type]

    def is_asked() -> int:
        return host_memory.word(memory, SENDING)

    assert not is_asked()
    with sending.under_way():
        with sending.under_way():
            assert is_asked()
        assert is_asked(), "another one is"
    assert not is_asked()


def test_what_is_sent_makes_way_for_the_training(memory: int) -> None:
    """The real pace, which looks at the words of the ranks' memory."""
    pace = Pace()
    sending = Sending(pace, [memory], EventLog())
    pace.set_rate(1e9, 1000.0)
    host_memory.put_word(memory, NETWORK_USED, 1)
    size = 1 << 20
    other = host_memory.create()
    host_memory.reserve(memory, 0, size)
    window = chunks.window(memory, host_memory.data_place(0), size)
    to = chunks.window(other, host_memory.data_place(0), size)
    digests = chunks.digests(window)
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(chunks.receive, theirs.fileno(), to, digests, 60.0)
        sent = pool.submit(chunks.send, ours.fileno(), window, digests, pace, 60.0)
        time.sleep(0.2)
        assert not sent.done()
        host_memory.put_word(memory, NETWORK_USED, 0)
        sent.result(60)
        received.result(60)
    del sending
    for one in (ours, theirs):
        one.close()
    os.close(other)


def test_what_the_training_waits_for_goes_at_once(memory: int) -> None:
    """The real pace, which looks at the words of the ranks' memory."""
    size = 1 << 20
    other = host_memory.create()
    os.pwrite(memory, b"state" * (size // 5), host_memory.data_place(0))
    window = chunks.window(memory, host_memory.data_place(0), size)
    digests = chunks.digests(window)
    pace = Pace()
    sending = Sending(pace, [memory], EventLog())
    pace.set_rate(1)
    ours, theirs = socket.socketpair()
    to = chunks.window(other, host_memory.data_place(0), size)
    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(chunks.receive, theirs.fileno(), to, digests, 60.0)
        sent = pool.submit(chunks.send, ours.fileno(), window, digests, pace, 60.0)
        time.sleep(0.2)
        assert not sent.done()
        host_memory.put_word(memory, AWAITED, 1)
        sent.result(60)
        received.result(60)
    assert bytes(to) == bytes(window)
    del sending
    for one in (ours, theirs):
        one.close()
    os.close(other)
