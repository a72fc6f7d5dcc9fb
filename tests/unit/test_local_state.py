"""The ring of rank-local states that outlives its rank."""

import os
import random
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.data.random_state import RandomState
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tensor_file import head_of
from jitckpt.encoding.tree_codec import to_json
from jitckpt.errors import SaveError
from jitckpt.ring import format as ring_format
from jitckpt.ring import local_state, wishes
from jitckpt.ring import recorder as recorder_module
from jitckpt.ring.content import Content
from jitckpt.ring.format import Region
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.ring.tail import Tail
from jitckpt.saves import folders
from jitckpt.saves.layout import Identity
from jitckpt.state.host_state import Unchanged

IDENTITY = Identity(job="j", fingerprint="f", world_size=2, rank=1, shard=0, shards=1)
SLOTS = 4
LIMIT = 2 << 20


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = local_state.create()
    yield descriptor
    os.close(descriptor)


class Warnings:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)


def recorder(memory: int, limit: int = LIMIT, warn: Warnings | None = None) -> Recorder:
    def no_device(area: tuple[int, int], value: int, source: tuple[int, int], stream: int) -> None:
        raise AssertionError("there is no device")

    return Recorder(Ring(memory, IDENTITY, SLOTS, limit), no_device, warn or Warnings())


def parts(step: int, size: int = 100) -> dict[str, tree_codec.Encoded]:
    value = {"step": step, "numbers": torch.full((size,), step), "text": "x" * (step % 50)}
    return {"random": tree_codec.encode(value, "random")}


def is_right(state: local_state.LocalState) -> bool:
    value = tree_codec.decode(state.trees["random"], state.tensors)
    text_is_right = value["text"] == "x" * (state.step % 50)
    return value["step"] == state.step and bool((value["numbers"] == state.step).all()) and text_is_right


def test_an_untouched_memory_holds_nothing(memory: int) -> None:
    assert local_state.read_identity(memory) is None
    assert local_state.read(memory) == []


def test_the_last_steps_are_kept(memory: int) -> None:
    record = recorder(memory)
    for step in range(1, 11):
        record.write(step, final=False, parts=parts(step))
        if step < 10:
            record.write(step, final=True, parts=parts(step))
    states = local_state.read(memory)
    assert local_state.read_identity(memory) == IDENTITY
    assert [(state.step, state.final) for state in states] == [(10, False), (9, True), (8, True), (7, True)]
    assert all(is_right(state) for state in states)
    assert all(state.missing == state.left_out == () for state in states)


def test_parts_that_are_the_same_objects_are_there_for_every_step(memory: int) -> None:
    record = recorder(memory)
    same = tree_codec.encode({"t": torch.arange(5)}, "extra")
    for step in range(1, 8):
        changing = parts(step // 2 * 2)["random"] if step % 2 else same
        record.write(step, final=False, parts={"extra": same, "random": changing})
        newest = local_state.read(memory)
        record.write(step, final=True, parts={"extra": same, "random": changing})
        assert [state.final for state in local_state.read(memory)] == [state.final for state in newest]
    for state in local_state.read(memory):
        changing = parts(state.step // 2 * 2)["random"] if state.step % 2 else same
        assert not state.final, "the step has changed nothing, so nothing is written again"
        assert state.trees == {"extra": same.tree, "random": changing.tree}
        expected = same.tensors | changing.tensors
        assert state.tensors.keys() == expected.keys()
        assert all(torch.equal(state.tensors[name], value) for name, value in expected.items())


def test_new_values_under_the_same_tree_are_there_for_every_step(memory: int) -> None:
    record = recorder(memory)
    same = tree_codec.encode({"t": torch.arange(5)}, "extra")
    other = tree_codec.encode([1, torch.ones(2)], "other")
    for step in range(1, 8):
        values = torch.arange(step, step + 5 + step // 6)  # longer in the end
        extra = tree_codec.Encoded(same.tree, {"extra.t": values})
        record.write(step, final=step % 2 == 0, parts={"extra": extra, "other": other})
    for state in local_state.read(memory):
        assert state.final == (state.step % 2 == 0)
        assert state.trees == {"extra": same.tree, "other": other.tree}
        assert torch.equal(
            state.tensors["extra.t"], torch.arange(state.step, state.step + 5 + state.step // 6)
        )
        assert torch.equal(state.tensors["other.1"], torch.ones(2))


def test_memory_is_taken_only_as_it_is_used(memory: int) -> None:
    recorder(memory, limit=1 << 30).write(1, final=True, parts=parts(1))
    assert os.fstat(memory).st_size > 1 << 29
    assert os.fstat(memory).st_blocks * 512 < 1 << 17


def test_one_write_a_step_uses_one_area_of_each_slot(memory: int) -> None:
    """The other would be as much memory again, that falls out of the processor's caches."""
    keeper = recorder(memory)
    for step in range(1, 3 * SLOTS + 1):
        keeper.write(step, final=False, parts={"extra": tree_codec.encode({"epoch": step}, "extra")})
    used = [
        [ring_format.read_blob(memory, place, keeper._ring.area_bytes) is not None for place in places]
        for places in (
            [ring_format.host_area(slot, version, SLOTS, keeper._ring.area_bytes) for slot in range(SLOTS)]
            for version in (0, 1)
        )
    ]
    assert used == [[True] * SLOTS, [False] * SLOTS]
    assert [state.step for state in local_state.read(memory)] == [12, 11, 10, 9]


def test_a_limit_that_is_too_small_is_said(memory: int) -> None:
    with pytest.raises(ValueError, match="local_state_limit is 1000 bytes; the least that works is 282624"):
        recorder(memory, limit=1000)
    recorder(memory, limit=282624)


def test_the_largest_tensor_is_left_out_over_the_limit_and_named_once(memory: int) -> None:
    warn = Warnings()
    record = recorder(memory, warn=warn)
    for step in (1, 2):
        extra = {"huge": torch.zeros(10 << 20), "small": torch.ones(3), "position": step}
        record.write(step, final=True, parts=parts(step) | {"extra": tree_codec.encode(extra, "extra")})
    assert len(warn.texts) == 1
    assert warn.texts[0].startswith(f"extra.huge ({40 << 20} bytes) does not fit")
    state = local_state.read(memory)[0]
    assert is_right(state)
    assert state.missing == ("extra.huge",)
    assert state.trees["extra"]["position"] == 2
    assert state.tensors["extra.small"].tolist() == [1, 1, 1]


def test_the_limit_that_is_asked_for_is_enough(memory: int) -> None:
    warn = Warnings()
    extra = tree_codec.encode({"huge": torch.arange(10 << 20), "small": torch.ones(3)}, "extra")
    recorder(memory, warn=warn).write(1, final=True, parts=parts(1) | {"extra": extra})
    (asked,) = re.findall(r"local_state_limit=(\d+)\.$", warn.texts[0])
    recorder(memory, limit=int(asked), warn=warn).write(1, final=True, parts=parts(1) | {"extra": extra})
    assert len(warn.texts) == 1
    (state,) = local_state.read(memory)
    assert state.missing == ()
    assert torch.equal(state.tensors["extra.huge"], torch.arange(10 << 20))


def test_a_part_without_tensors_is_left_out_whole_over_the_limit(memory: int) -> None:
    warn = Warnings()
    extra = tree_codec.encode({"order": list(range(500_000)), "t": torch.ones(1)}, "extra")
    recorder(memory, warn=warn).write(1, final=True, parts={"extra": extra} | parts(1))
    (state,) = local_state.read(memory)
    assert is_right(state)
    assert (state.left_out, state.missing, set(state.trees)) == (("extra",), (), {"random"})
    assert "extra.t" not in state.tensors
    assert warn.texts[0].startswith("extra (")


def test_a_torn_host_part_leaves_the_one_before(memory: int) -> None:
    ring = Ring(memory, IDENTITY, SLOTS, LIMIT)
    record = Recorder(ring, lambda *_: None, Warnings())
    record.write(5, final=False, parts=parts(5))
    record.write(5, final=True, parts=parts(5))
    newest = ring_format.host_area(5 % SLOTS, 1, SLOTS, ring.area_bytes)
    for offset in (0, 8, 16, 30, 60, 200):
        before = os.pread(memory, 1, newest + offset)
        os.pwrite(memory, bytes([before[0] ^ 1]), newest + offset)
        (state,) = local_state.read(memory)
        assert (state.step, state.final) == (5, False), offset
        assert is_right(state)
        os.pwrite(memory, before, newest + offset)
    assert local_state.read(memory)[0].final


class DeviceSide:
    """Writes areas and words as the device's stream would."""

    def __init__(self, memory: int, ring: Ring, step: int) -> None:
        self.memory, self.ring, self.step = memory, ring, step

    def place(self, final: bool) -> tuple[int, int]:
        return ring_format.device_area(self.step % SLOTS, final, SLOTS, self.ring.area_bytes)

    def begin(self, final: bool, word: int) -> None:
        os.pwrite(self.memory, struct.pack("<Q", word), self.place(final)[0])

    def write(self, final: bool, value: float) -> None:
        os.pwrite(self.memory, struct.pack("<2f", value, value), self.place(final)[1])

    def end(self, final: bool, word: int) -> None:
        os.pwrite(self.memory, struct.pack("<Q", word), self.place(final)[0] + 8)


def test_device_tensors_count_only_between_their_two_words(memory: int) -> None:
    ring = Ring(memory, IDENTITY, SLOTS, LIMIT)
    tree = {"buffers": {"mean": {"$tensor": "buffers.mean", "device": "cuda"}}}
    entries = to_json({"buffers.mean": ("float32", [2], 0)})
    regions = {False: Region(1, entries)}
    device = DeviceSide(memory, ring, 7)

    def host(final: bool) -> None:
        content = Content(
            final=final,
            trees_text=to_json(tree),
            head=head_of({})[1],
            tensors={},
            regions=regions,
            left_out=(),
        )
        ring.write_host(7, content.blob)

    def mean() -> list[float] | None:
        (state,) = local_state.read(memory)
        found = state.tensors.get("buffers.mean")
        assert state.missing == (() if found is not None else ("buffers.mean",))
        return None if found is None else found.tolist()

    def earlier() -> Any:
        (state,) = local_state.read(memory)
        return state.document().get("earlier")

    host(final=False)
    assert mean() is None
    device.begin(False, 0x70001)
    device.write(False, 1.0)
    assert mean() is None
    device.end(False, 0x70001)
    assert mean() == [1, 1]
    assert earlier() is None

    # The host has gone on; the device dies before, while or after it writes the final area.
    regions[True] = Region(1, entries)
    host(final=True)
    assert mean() == [1, 1]
    assert earlier() == ["buffers.mean"], "the host's part is newer"
    device.begin(True, 0x70001)
    device.write(True, 2.0)
    assert mean() == [1, 1]
    device.end(True, 0x70001)
    assert mean() == [2, 2]
    assert earlier() is None

    # A second micro-batch overwrites the provisional area: half-written it is worth nothing.
    regions.pop(True)
    regions[False] = Region(2, entries)
    host(final=False)
    assert mean() is None
    device.begin(False, 0x70002)
    assert mean() is None
    device.end(False, 0x70002)
    assert mean() == [1, 1]


def test_what_the_forward_pass_has_left_stays_until_what_is_written_before_the_step_is_there(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have stepped by then: this rank's gradients were sent before."""
    ring = Ring(memory, IDENTITY, SLOTS, LIMIT)
    monkeypatch.setattr(ring, "device_area", lambda step, final: (step, final))
    monkeypatch.setattr(recorder_module, "stream_of", lambda device: lambda: 0)
    told: list[tuple[bool, int]] = []
    record = Recorder(ring, lambda area, word, *_: told.append((bool(area[1]), word)), Warnings())
    monkeypatch.setattr(record._staging, "gather", lambda tensors: (0, 0))
    device = DeviceSide(memory, ring, 7)

    def write(value: int, final: bool, beside: bool = False) -> None:
        part = tree_codec.Encoded(
            {"losses": {"$tensor": "extra.losses", "device": "meta"}, "steps": value},
            {"extra.losses": torch.empty(2, device="meta")},
        )
        record.write(7, final, {"extra": part}, beside=beside)

    def read() -> tuple[int, list[float]]:
        (state,) = local_state.read(memory)
        assert not state.missing
        return state.trees["extra"]["steps"], state.tensors["extra.losses"].tolist()

    def come_to(value: float) -> Iterator[None]:
        area, word = told.pop(0)
        device.begin(area, word)
        yield
        device.write(area, value)
        yield
        device.end(area, word)
        yield

    write(1, final=False)
    list(come_to(1.0))
    assert read() == (1, [1, 1])
    write(2, final=False, beside=True)
    for _ in come_to(2.0):
        assert read()[0] == 2
        assert read()[1] in ([1, 1], [2, 2])
    assert read() == (2, [2, 2])
    write(3, final=True)
    for _ in come_to(3.0):
        assert read()[1] in ([1, 1], [2, 2], [3, 3])
    assert read() == (3, [3, 3])
    assert ring.is_written(7)


def test_the_final_area_counts_where_nothing_else_has_changed(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(memory, IDENTITY, SLOTS, LIMIT)
    monkeypatch.setattr(ring, "device_area", lambda step, final: (step, final))
    monkeypatch.setattr(recorder_module, "stream_of", lambda device: lambda: 0)
    words: list[int] = []
    record = Recorder(ring, lambda area, word, source, stream: words.append(word), Warnings())
    monkeypatch.setattr(record._staging, "gather", lambda tensors: (0, 0))
    mean = tree_codec.Encoded(
        {"mean": {"$tensor": "buffers.mean", "device": "meta"}},
        {"buffers.mean": torch.empty(2, device="meta")},
    )
    device = DeviceSide(memory, ring, 7)

    def read() -> list[float]:
        (state,) = local_state.read(memory)
        return state.tensors["buffers.mean"].tolist() if not state.missing else []

    for micro_batch in range(2):
        record.write(7, final=False, parts={"buffers": mean})
        assert not read()
        for mark in (device.begin, device.end):
            mark(False, words[-1])
        device.write(False, micro_batch)
        assert read() == [micro_batch, micro_batch]
        assert ring.is_written(7)
    record.write(7, final=True, parts={"buffers": mean})
    assert read() == [1, 1]
    assert not ring.is_written(7)
    device.write(True, 2)
    for mark in (device.begin, device.end):
        mark(True, words[-1])
    assert read() == [2, 2]
    assert ring.is_written(7)
    assert len(words) == len({*words[:2]}) + 1


def test_buffers_that_do_not_lie_as_in_the_ring_are_gathered_before(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(memory, IDENTITY, SLOTS, LIMIT)
    monkeypatch.setattr(ring, "device_area", lambda step, final: (step, final))
    monkeypatch.setattr(recorder_module, "stream_of", lambda device: lambda: 0)
    sources: list[tuple[int, int]] = []
    record = Recorder(ring, lambda area, word, source, stream: sources.append(source), Warnings())
    monkeypatch.setattr(record._staging, "gather", lambda tensors: (77, len(tensors)))

    def source(*tensors: torch.Tensor) -> tuple[int, int]:
        named = {f"buffers.{number}": tensor for number, tensor in enumerate(tensors)}
        tree = [{"$tensor": name, "device": "meta"} for name in named]
        for final in (False, True):
            record.write(len(sources), final, {"buffers": tree_codec.Encoded(tree, named)})
        assert sources[-1] == sources[-2]
        return sources[-1]

    two, six = torch.empty(2, device="meta"), torch.empty(2, 3, device="meta")
    assert source(two) == (two.data_ptr(), 8)
    assert source(six) == (six.data_ptr(), 24)
    assert source(six.T) == (77, 1)
    assert source(two, six) == (77, 2)
    assert source(two.to(torch.complex64).conj()) == (77, 1)
    assert source(two) == (two.data_ptr(), 8)


def test_where_only_values_on_the_host_change_every_step_has_its_own(memory: int) -> None:
    record = recorder(memory)
    tree = {"counter": {"$tensor": "a.counter"}, "rest": {"$tensor": "a.rest"}}
    rest = torch.arange(5)
    written: dict[int, tuple[bool, list[int]]] = {}
    for step in range(1, 3 * SLOTS):
        for final in (False, True):
            counter = torch.tensor([10 * step + final, -step])
            record.write(step, final, {"a": tree_codec.Encoded(tree, {"a.counter": counter, "a.rest": rest})})
            counter.zero_()  # what was written is not this tensor's any more
            written[step] = final, [10 * step + final, -step]
            (state,) = [state for state in local_state.read(memory) if state.step == step]
            assert (state.final, state.tensors["a.counter"].tolist()) == written[step]
            assert state.tensors["a.rest"].tolist() == [0, 1, 2, 3, 4]
    states = local_state.read(memory)
    assert [state.step for state in states] == list(range(3 * SLOTS - 1, 2 * SLOTS - 1, -1))
    assert all((one.final, one.tensors["a.counter"].tolist()) == written[one.step] for one in states)


class Generator:
    """Of a device, that has come to a place."""

    def __init__(self) -> None:
        self.place = 0

    def capture(self) -> bytes:
        return struct.pack("=QQ", 7, self.place)


LOOP = {"numbers": {"$tensor": "loop.numbers"}}


class Numbers:
    """The random numbers of a rank and the place of its loop, as the hooks write them."""

    def __init__(self, memory: int) -> None:
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)  # an earlier test may have left a normal number, kept for later
        self.record, self.generator = recorder(memory), Generator()
        self.random = self._state()
        self.batches = 0

    def _state(self) -> RandomState:
        state = RandomState(None)
        state._on_device = self.generator  # type: ignore[assignment]
        return state

    def now(self) -> dict[str, tree_codec.Encoded]:
        return {"random": self._state().capture(), "loop": self._loop()}

    def _loop(self) -> tree_codec.Encoded:
        return tree_codec.Encoded(LOOP, {"loop.numbers": torch.tensor([self.batches])})

    def write(self, step: int, final: bool) -> bool:
        """Whether nothing had to be taken anew."""
        again = self.record.write_again(step, final)
        if not again:
            parts = {"random": self.random.capture(), "loop": self._loop()}
            self.record.write(step, final, parts, self._unchanged())
        return again

    def _unchanged(self) -> Unchanged | None:
        look, generator = self.random.unchanged()
        return (
            None
            if look is None or generator is None
            else Unchanged(
                (look,),
                going_on=(generator, ("loop.numbers", lambda: struct.pack("=Q", self.batches))),
            )
        )


CHANGES: dict[str, Callable[[Numbers], object]] = {
    "nothing": lambda numbers: None,
    "host": lambda numbers: random.random(),
    "device": lambda numbers: setattr(numbers.generator, "place", numbers.generator.place + 4),
    "loop": lambda numbers: setattr(numbers, "batches", numbers.batches + 1),
    "device, back": lambda numbers: setattr(numbers.generator, "place", 4),
}


@given(st.lists(st.tuples(*(st.sampled_from(sorted(CHANGES)) for _ in range(3))), max_size=12))
def test_what_is_written_again_is_the_state_as_it_is(changes: list[tuple[str, ...]]) -> None:
    """In every step two micro-batches and the end; before each of the three something may change."""
    memory = local_state.create()
    try:
        numbers, before = Numbers(memory), random.getstate()
        for step, of_step in enumerate(changes, 1):
            for number, change in enumerate(of_step):
                CHANGES[change](numbers)
                again = numbers.write(step, final=number == 2)
                if step > 1 and not {"host", "device", "loop"} & {*of_step, *changes[step - 2]}:
                    assert again or "device, back" in of_step
                newest, now = local_state.read(memory)[0], numbers.now()
                assert (newest.step, newest.trees) == (step, {name: one.tree for name, one in now.items()})
                expected = now["random"].tensors | now["loop"].tensors
                assert newest.tensors.keys() == expected.keys()
                assert all(torch.equal(newest.tensors[name], value) for name, value in expected.items())
        random.setstate(before)
    finally:
        os.close(memory)


def test_what_goes_on_alone_is_written_again(memory: int) -> None:
    numbers = Numbers(memory)
    assert not numbers.write(1, final=False)
    for step in range(1, 3 * SLOTS):
        assert numbers.write(step, final=False)
        numbers.generator.place += 4
        numbers.batches += 1
        assert numbers.write(step, final=False)
        assert numbers.write(step, final=True)
        numbers.generator.place += 4
    assert not numbers.write(step, final=True), "they have gone on since the forward pass"


def test_what_does_not_fit_any_more_is_taken_anew(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(memory)
    assert not numbers.write(1, final=False)
    write, fits = numbers.record._write_taken, iter([False])
    monkeypatch.setattr(numbers.record, "_write_taken", lambda *what: next(fits, True) and write(*what))
    assert not numbers.write(2, final=False)
    assert [state.step for state in local_state.read(memory)] == [2, 1]


def test_nothing_is_written_again_that_is_too_large_or_was_never_written(memory: int) -> None:
    numbers = Numbers(memory)
    assert not numbers.record.write_again(1, final=False)
    numbers.record._too_large.add("random.device")
    for step in (1, 2):
        assert not numbers.write(step, final=False)
        assert local_state.read(memory)[0].missing == ("random.device",)


def test_a_killed_writer_leaves_only_whole_states(memory: int) -> None:
    random.seed(0)
    for _ in range(25):
        os.ftruncate(memory, 0)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                record = recorder(memory)
                for step in range(1, 1 << 60):
                    record.write(step, final=False, parts=parts(step, size=step * 37 % 5000))
                    record.write(step, final=True, parts=parts(step, size=step * 91 % 5000))
                    os.write(writing, struct.pack("<Q", step))
            finally:
                os._exit(1)
        os.close(writing)
        first = os.read(reading, 8)
        time.sleep(random.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reading, "rb") as rest:
            acknowledged = first + rest.read()
        last = struct.unpack("<Q", acknowledged[-8:])[0]
        states = local_state.read(memory)
        assert all(is_right(state) for state in states)
        found = {state.step: state.final for state in states}
        assert max(found) in (last, last + 1)
        # Only the slot that was being written may have lost its older state.
        kept = range(max(1, last - SLOTS + 2), last + 1)
        assert all(found.get(step) for step in kept), (found, last)


def test_a_reader_beside_a_living_writer_sees_only_whole_states(memory: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            record = recorder(memory)
            for step in range(1, 1 << 60):
                record.write(step, final=True, parts=parts(step, size=step * 91 % 5000))
        finally:
            os._exit(1)
    try:
        while not local_state.read(memory):
            time.sleep(0.001)
        for _ in range(200):
            states = local_state.read(memory)
            assert states
            assert all(is_right(state) for state in states)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("change", [b"X", b"JITCKPT1\xff"])
def test_a_damaged_first_page_is_said(memory: int, change: bytes) -> None:
    recorder(memory)
    os.pwrite(memory, change, 0)
    with pytest.raises(SaveError, match="first page is not valid"):
        local_state.read(memory)
    os.ftruncate(memory, 10)
    with pytest.raises(SaveError, match="too short"):
        local_state.read_identity(memory)


def test_a_state_becomes_a_save_of_its_own(memory: int, tmp_path: Path) -> None:
    recorder(memory).write(9, final=True, parts=parts(9))
    size = local_state.write_save(memory, tmp_path, 9)
    (record,) = folders.find(tmp_path)
    assert (record.step, record.kind, record.rank) == (9, "local", 1)
    assert folders.verify(record) is None
    assert record.metadata is not None
    assert asdict(record.metadata.identity) == asdict(IDENTITY)
    assert size == sum(path.stat().st_size for path in record.path.iterdir())
    saved = folders.read(record)
    value = tree_codec.decode(saved.document["local"]["trees"]["random"], saved.tensors)
    assert value["step"] == 9
    with pytest.raises(SaveError, match="no whole state of its own for step 8"):
        local_state.write_save(memory, tmp_path, 8)


def test_a_rank_that_writes_no_state_any_more_tells_how_far_it_is(memory: int) -> None:
    ring = Ring(memory, IDENTITY, 4, 1 << 20)
    ring.write_host(3, bytearray(ring_format.BLOB_HEADER.size))
    tail = Tail(memory)
    assert tail.news()
    for step in (4, 300):
        ring.note_begun(step)
        assert local_state.newest_step([memory]) == local_state.begun_step(memory) == step
    assert tail.news() == [], "other hosts keep states, of which there are no new ones"
    assert local_state.read_identity(memory) == IDENTITY, "the first page is still whole"


def test_all_ranks_are_asked_for_a_save_of_the_same_step_that_none_has_come_to() -> None:
    descriptors = [local_state.create() for _ in range(2)]
    rings = [Ring(descriptor, IDENTITY, 4, 1 << 20) for descriptor in descriptors]
    assert [ring.wanted_step() for ring in rings] == [0, 0]
    rings[0].write_host(7, bytearray(ring_format.BLOB_HEADER.size))
    assert wishes.want_save(descriptors) is None, "one rank has made no step"
    assert [ring.wanted_step() for ring in rings] == [0, 0]
    for step in (8, 9):
        rings[1].write_host(step, bytearray(ring_format.BLOB_HEADER.size))
    wanted = wishes.want_save(descriptors)
    assert wanted is not None
    assert wanted > 9
    assert [ring.wanted_step() for ring in rings] == [wanted, wanted]
    assert [wishes.may_end(one) for one in descriptors] == [False, False]
    wishes.let_end(descriptors[1])
    assert [wishes.may_end(one) for one in descriptors] == [False, True]
    assert [ring.wanted_step() for ring in rings] == [wanted, wanted]
    assert local_state.read_identity(descriptors[0]) == IDENTITY, "the first page is still whole"
    for descriptor in descriptors:
        os.close(descriptor)
