"""Copies of rings on another host: at any moment they hold whole states, and in the end all of them."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tensor_file import head_of
from jitckpt.encoding.tree_codec import to_json
from jitckpt.ring import format as ring_format
from jitckpt.ring import local_state
from jitckpt.ring.content import Content
from jitckpt.ring.copies import ANSWER_SECONDS, Asker, Copier, Copies
from jitckpt.ring.format import Region
from jitckpt.ring.local_state import LocalState
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves.layout import Identity
from jitckpt.wire.agents import RingPart

IDENTITY = Identity(job="j", fingerprint="f", world_size=2, rank=3, shard=0, shards=1)
SLOTS = 4
LIMIT = 2 << 20


class Pair:
    """A ring and its copy; what was sent waits in `on_the_way` until it arrives."""

    def __init__(self) -> None:
        self.memory = local_state.create()
        self.copies = Copies()
        self.on_the_way: list[tuple[RingPart, bytes]] = []
        self.copier = Copier({3: self.memory}, lambda *sent: self.on_the_way.append(sent), lambda: 0)

    def arrive(self, count: int = 1000) -> None:
        for part, data in self.on_the_way[:count]:
            self.copies.write(part.rank, part.size, part.at, data)
        del self.on_the_way[:count]

    def states(self) -> tuple[list[LocalState], list[LocalState]]:
        copied = local_state.read(self.copies.rings[3]) if self.copies.rings else []
        return local_state.read(self.memory), copied

    def close(self) -> None:
        os.close(self.memory)
        self.copies.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def parts(step: int, size: int) -> dict[str, tree_codec.Encoded]:
    return {"random": tree_codec.encode({"step": step, "numbers": torch.full((size,), step)}, "random")}


def value(state: LocalState) -> Any:
    return tree_codec.decode(state.trees["random"], state.tensors)


def recorder(pair: Pair) -> Recorder:
    return Recorder(Ring(pair.memory, IDENTITY, SLOTS, LIMIT), lambda *_: None, lambda _: None)


def equal(one: list[LocalState], other: list[LocalState]) -> bool:
    return [(s.step, s.final, s.missing, value(s)["step"]) for s in one] == [
        (s.step, s.final, s.missing, value(s)["step"]) for s in other
    ]


def test_before_the_training_begins_there_is_nothing_to_copy(pair: Pair) -> None:
    pair.copier.look()
    assert pair.on_the_way == []


@settings(deadline=None)
@given(st.lists(st.sampled_from(["step", "look", "arrive"]), max_size=60))
def test_a_copy_holds_whole_states_at_any_moment_and_all_in_the_end(events: list[str]) -> None:
    pair, step, order = Pair(), 0, random.Random(len(events))
    record = recorder(pair)
    for event in events:
        if event == "step":
            step += 1
            record.write(step, final=False, parts=parts(step, order.randint(1, 2000)))
            record.write(step, final=True, parts=parts(step, order.randint(1, 2000)))
        elif event == "look":
            pair.copier.look()
        else:
            pair.arrive(order.randint(1, 5))
        for state in pair.states()[1]:
            numbers = value(state)["numbers"]
            assert value(state)["step"] == state.step
            assert bool((numbers == state.step).all())
    pair.copier.look()
    pair.arrive()
    assert equal(*pair.states())
    if step:
        assert local_state.read_identity(pair.copies.rings[3]) == IDENTITY
        pair.copier.look()
        assert pair.on_the_way == [], "nothing is sent twice"
    pair.close()


def test_device_tensors_are_copied_once_the_device_has_written_them(pair: Pair) -> None:
    ring = Ring(pair.memory, IDENTITY, SLOTS, LIMIT)
    tree = {"buffers": {"mean": {"$tensor": "buffers.mean", "device": "cuda"}}}
    regions = {True: Region(1, to_json({"buffers.mean": ("float32", [2], 0)}))}
    words, area = ring_format.device_area(7 % SLOTS, True, SLOTS, ring.area_bytes)

    def mean() -> list[float] | None:
        pair.copier.look()
        pair.arrive()
        (state,) = pair.states()[1]
        found = state.tensors.get("buffers.mean")
        return None if found is None else found.tolist()

    content = Content(
        final=True, trees_text=to_json(tree), head=head_of({})[1], tensors={}, regions=regions, left_out=()
    )
    ring.write_host(7, content.blob)
    assert mean() is None
    os.pwrite(pair.memory, struct.pack("<Q", 0x70001), words)
    os.pwrite(pair.memory, struct.pack("<2f", 5, 6), area)
    assert mean() is None
    os.pwrite(pair.memory, struct.pack("<Q", 0x70001), words + 8)
    assert mean() == [5, 6]


def test_a_second_training_of_the_same_process_starts_with_an_empty_copy(pair: Pair) -> None:
    recorder(pair).write(9, final=True, parts=parts(9, 10))
    pair.copier.look()
    pair.arrive()
    again = Identity(job="j", fingerprint="another", world_size=2, rank=3, shard=0, shards=1)
    record = Recorder(Ring(pair.memory, again, SLOTS, LIMIT), lambda *_: None, lambda _: None)
    record.write(1, final=True, parts=parts(1, 10))
    pair.copier.look()
    pair.arrive()
    assert equal(*pair.states())
    assert [state.step for state in pair.states()[1]] == [1]


@pytest.fixture
def asking() -> Iterator[tuple[socket.socket, Asker, list[str]]]:
    """The agent's end of a rank's socket, the rank's side, and its warnings."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    warnings: list[str] = []
    asker = Asker(theirs.detach(), warnings.append, 60.0)
    with ours, asker._socket:
        yield ours, asker, warnings


def test_a_rank_waits_until_the_other_host_has_its_state(
    pair: Pair, asking: tuple[socket.socket, Asker, list[str]]
) -> None:
    """Of the step that it asks for: what was sent before it asked does not count."""
    agents_end, asker, warnings = asking
    confirmed: list[Callable[[], None]] = []
    pair.copier = Copier(
        {3: pair.memory},
        lambda *sent: pair.on_the_way.append(sent),
        lambda: 0,
        confirmed.append,
        [agents_end],
    )
    recorder(pair).write(7, final=False, parts=parts(7, 10))
    waiting = threading.Thread(target=asker.wait, args=(7,))
    waiting.start()
    pair.copier.start()
    while not confirmed:
        time.sleep(0.001)
    pair.arrive()
    assert [state.step for state in pair.states()[1]] == [7], "all is on its way before it is confirmed"
    assert waiting.is_alive()
    confirmed[0]()
    waiting.join(60)
    assert not waiting.is_alive()
    pair.copier.stop()
    assert warnings == []


def test_a_rank_asks_for_a_copy_once_the_device_has_written_its_part(
    pair: Pair, asking: tuple[socket.socket, Asker, list[str]]
) -> None:
    agents_end, asker, _ = asking
    ring = Ring(pair.memory, IDENTITY, SLOTS, LIMIT)
    ring.regions(6)[True] = Region(1, "{}")  # of another step, and never written
    ring.regions(7).update({final: Region(1 + final, "{}") for final in (False, True)})
    waiting = threading.Thread(target=asker.wait, args=(7, lambda: ring.is_written(7)))
    waiting.start()
    agents_end.setblocking(False)
    for final in (True, False):
        with pytest.raises(BlockingIOError):
            agents_end.recv(8)
        assert not ring.is_written(7)
        words, _ = ring_format.device_area(7 % SLOTS, final, SLOTS, ring.area_bytes)
        os.pwrite(pair.memory, struct.pack("<2Q", 0x70001 + final, 0x70001 + final), words)
    agents_end.settimeout(60)
    agents_end.send(agents_end.recv(8))
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_rank_waits_for_no_copy_for_ever(asking: tuple[socket.socket, Asker, list[str]]) -> None:
    agents_end, asker, warnings = asking
    assert asker._socket.gettimeout() == 60.0
    asker._socket.settimeout(0.01)
    asker.wait(7)
    assert asker._socket.gettimeout() == ANSWER_SECONDS, "the next ones are waited for less"
    asker._socket.settimeout(0.01)
    asker.wait(8)
    (warning,) = warnings
    assert "of step 7; the training goes on. If this host is lost now, that may be lost, too." in warning
    agents_end.send((1).to_bytes(8, "little"))  # late answers are to none of what it asks now
    agents_end.send((3).to_bytes(8, "little"))
    asker._socket.settimeout(59)
    asker.wait(9)
    assert asker._socket.gettimeout() == 60.0, "copies come again"
    assert len(warnings) == 1


def test_a_rank_whose_agent_has_ended_goes_no_further() -> None:
    """Else another host's ranks could end the step, and of this one's own state of it there is no copy."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held: list[float] = []
    warnings: list[str] = []
    asker = Asker(theirs.detach(), warnings.append, 60.0, held.append)
    with asker._socket:
        waiting = threading.Thread(target=asker.wait, args=(7,))
        waiting.start()
        assert ours.recv(8), "it waits for the answer"
        ours.close()
        waiting.join(60)
        assert held == [60.0], "and then for its own end"
        asker.wait(8)
        assert held == [60.0]
    assert warnings == []


@pytest.mark.parametrize("place", [-1, 4090, 1 << 50])
def test_a_piece_that_lies_outside_is_refused(pair: Pair, place: int) -> None:
    with pytest.raises(ValueError, match="no part of a ring"):
        pair.copies.write(3, 4096, place, bytes(10))
