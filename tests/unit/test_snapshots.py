"""When a rank makes a snapshot for the memory tier, and when its training waits for the one before."""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_host_memory import made

from jitckpt.errors import NativeError, SaveError
from jitckpt.saves import folders
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, shard
from jitckpt.tiers.host_memory import (
    COUNT_GRADIENTS,
    GRADIENTS,
    NO_GRADIENTS,
    OFF,
    READY,
    SAFE,
    SETTLED,
    SKIPPED,
    STEP_BYTES,
    HostMemory,
)
from jitckpt.worker.saving import gradients
from jitckpt.worker.saving.gradients import CannotBeMadeError
from jitckpt.worker.saving.host_copies import _laid_out_as
from jitckpt.worker.saving.periodic import PeriodicSaver, PeriodicSettings
from jitckpt.worker.saving.snapshots import SnapshotRule, Snapshots


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = host_memory.create()
    host_memory.put_word(descriptor, READY, 1)
    yield descriptor
    os.close(descriptor)


def made_of(memory: int) -> Snapshots:
    host: Any = SimpleNamespace(device=None)
    history: Any = None
    return Snapshots(
        SnapshotRule(memory),
        identity=Identity("job", "", 2, 0, 0, 2),
        timeline="first",
        host=host,
        history=history,
        write_word=lambda *_: None,
        warn=pytest.fail,
    )


def test_once_the_tier_has_ended_for_all_none_is_made_and_none_waited_for(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = made_of(memory)
    snapshots._newest = 1
    assert snapshots.is_due(2)
    turns = 0

    def wait(_: object) -> SimpleNamespace:
        nonlocal turns
        turns += 1
        host_memory.put_word(memory, OFF, 1)  # as the agent says meanwhile
        return SimpleNamespace(query=lambda: True)

    monkeypatch.setattr(torch.cuda, "current_stream", wait)
    assert not snapshots._may_begin(2)
    assert turns == 1
    assert host_memory.word(memory, SKIPPED) == 0, "it was not left out for want of time"
    assert not snapshots.is_due(3)


def test_what_is_read_from_memory_has_its_place_until_it_is(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is written from the snapshot of its step: meanwhile its place is not taken."""
    snapshots = made_of(memory)
    others = HostMemory({1: memory})
    for step in (1, 2):
        others.put(made(step, b"of step %d" % step))
    host_memory.put_word(memory, SAFE, 2)
    host_memory.put_word(memory, SETTLED, 2)
    snapshots._newest = 2
    assert snapshots.is_made_of(2)
    assert not snapshots.is_made_of(1), "a save of that copies from the device"
    snapshots.hold(1)
    read: list[bytes] = []

    def wait(_: object) -> SimpleNamespace:
        state = snapshots.read(1, threading.Event())
        read.append(state.tensors["big"].numpy().tobytes())
        return SimpleNamespace(query=lambda: True)

    monkeypatch.setattr(torch.cuda, "current_stream", wait)
    assert snapshots._may_begin(3)
    assert read == [b"of step 1"]
    with pytest.raises(SaveError, match="step 1 is not whole"):
        snapshots.read(1, threading.Event())
    others.descriptors.clear()  # the fixture's


def test_a_save_of_a_step_in_memory_copies_nothing_off_the_device(memory: int, tmp_path: Path) -> None:
    snapshots = made_of(memory)
    snapshots._newest = 2
    warnings: list[str] = []
    told: list[Any] = []
    unused: Any = None
    saver = PeriodicSaver(
        PeriodicSettings(2, 1, replica=True),
        root=tmp_path,
        identity=Identity("job", "", 2, 0, 0, 2),
        host=snapshots._host,
        history=unused,
        wanted_step=lambda: 0,
        write_word=lambda *_: pytest.fail("the device was asked for something"),
        report=told.append,
        warn=warnings.append,
        snapshots=snapshots,
    )
    saver.step_ended(2, {}, unused)
    assert saver.is_pending(2)
    begun = saver._begun
    assert begun is not None
    saver.copy_again(unused)
    others = HostMemory({1: memory})
    others.put(made(2, b"of step 2"))
    snapshots.hold(2)
    saver._write(begun, {}, {})
    assert warnings == []
    (record,) = folders.find(tmp_path)
    assert folders.verify(record) is None
    state = folders.read(record)
    assert state.tensors["big"].numpy().tobytes() == b"of step 2"
    assert state.document == {"step": 2, "reason": "periodic"}
    assert snapshots._held is None
    assert [one.step for one in told] == [2]
    others.descriptors.clear()


def test_the_next_one_begins_once_the_last_is_settled(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = made_of(memory)
    snapshots._newest = 1

    def wait(_: object) -> SimpleNamespace:
        host_memory.put_word(memory, SETTLED, 1)
        return SimpleNamespace(query=lambda: True)

    monkeypatch.setattr(torch.cuda, "current_stream", wait)
    assert snapshots._may_begin(2)
    assert snapshots.is_due(3)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        RuntimeError("NCCL error in torch"),
        NativeError("CUDA error 999"),
    ],
)
def test_a_device_that_fails_does_not_take_what_is_in_memory_with_it(
    memory: int, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is seen by the copies first, if the optimizer step's last kernel has failed."""
    kept = HostMemory({0: memory})
    kept.put(made(1, b"state"))
    snapshots = made_of(memory)
    told: list[str] = []
    monkeypatch.setattr(snapshots, "_warn", told.append)

    def refuses(*_: object) -> None:
        raise error

    monkeypatch.setattr(snapshots._copies, "begin", refuses)
    unused: Any = SimpleNamespace(all_tensors=dict)
    snapshots.step_ended(2, {}, unused)
    begun: Any = SimpleNamespace(number=1)
    monkeypatch.setattr(snapshots._copies, "are_there", refuses)
    snapshots._write(begun, {}, {})
    assert [one.step for one in kept.has()] == [1]
    assert told == []
    snapshots.step_ended(3, {}, unused)
    assert host_memory.word(memory, OFF) == 1, "it refuses each time, but the training goes on"
    assert len(told) == 1
    kept.descriptors.clear()


def test_what_lies_otherwise_on_the_device_is_in_memory_as_all_else(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies keep the device's order (channels last); in memory elements are in that of the shape."""
    monkeypatch.setattr("jitckpt.worker.saving.snapshots.as_it_is", lambda identity, _: identity)
    snapshots = made_of(memory)
    snapshots._slot = 0
    mapped = mmap.mmap(memory, mmap.PAGESIZE, offset=host_memory.data_place(0))
    room = snapshots._room.by_slot[0] = torch.frombuffer(mapped, dtype=torch.uint8)
    tensors = {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.randn(6, 7).t(),
        "plain": torch.randn(5),
        "scalar": torch.tensor(7.0),
    }
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        at = sum(shard.aligned(one.nbytes) for one in copies.values())
        copies[name] = _laid_out_as(room[at : at + tensor.nbytes].view(tensor.dtype), tensor)
        assert copies[name].stride() == tensor.stride()
        copies[name].copy_(tensor)
    begun: Any = SimpleNamespace(step=2, copies=copies, own={})
    snapshots._put_in(begun, {}, {})
    _, state = host_memory.read(memory, 2)
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())


def test_gradients_are_only_counted_where_it_is_not_known_yet_whether_they_are_sent(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host has of the state goes with them, and what the rank has alone on its device."""
    monkeypatch.setattr("jitckpt.worker.saving.snapshots.as_it_is", lambda identity, _: identity)
    host_memory.put_word(memory, GRADIENTS, COUNT_GRADIENTS)
    snapshots = made_of(memory)
    snapshots._slot = 0
    mapped = mmap.mmap(memory, mmap.PAGESIZE, offset=host_memory.data_place(0))
    room = snapshots._room.by_slot[0] = torch.frombuffer(mapped, dtype=torch.uint8)
    taken = SimpleNamespace(gradients={"gradient.a": torch.ones(100)}, check=lambda: None)
    monkeypatch.setattr(gradients, "take", lambda *_: taken)
    snapshots.optimizer_begins(2, None)
    assert snapshots._soon_gone(2) == {}, "none is copied"
    own = {"random": room[: shard.aligned(24)]}
    copies = {**own, "parameter": room[shard.aligned(24) : shard.aligned(24) + 400]}
    begun: Any = SimpleNamespace(step=2, copies=copies, own=own)
    snapshots._put_in(begun, {}, {"of the host": torch.zeros(3)})
    expected = shard.aligned(24) + shard.aligned(400) + shard.aligned(12)
    assert host_memory.word(memory, STEP_BYTES) == expected
    assert host_memory.word(memory, GRADIENTS) == NO_GRADIENTS, "once is enough"
    index, _ = host_memory.read(memory, 2)
    assert index.made_by is None


def test_where_no_host_can_make_the_step_nothing_is_said_of_gradients_that_nobody_has_asked_for(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_memory.put_word(memory, GRADIENTS, COUNT_GRADIENTS)
    snapshots = made_of(memory)  # a warning fails

    def refuses(*_: object) -> None:
        raise CannotBeMadeError("there are 2 optimizers, and it must be one")

    monkeypatch.setattr(gradients, "take", refuses)
    snapshots.optimizer_begins(2, None)
    assert host_memory.word(memory, GRADIENTS) == NO_GRADIENTS
    assert host_memory.word(memory, STEP_BYTES) == 0


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4)[:, :2], torch.zeros(3).expand(2, 3), torch.zeros(0, 3)])
def test_copies_of_what_has_gaps_are_laid_out_as_usual(tensor: torch.Tensor) -> None:
    copy = _laid_out_as(torch.zeros(tensor.numel()), tensor)
    assert copy.is_contiguous()
    assert copy.shape == tensor.shape
