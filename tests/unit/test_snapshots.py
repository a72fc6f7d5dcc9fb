"""When a rank makes a snapshot for the memory tier, and when its training waits for the one before."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import OFF, READY, SETTLED, SKIPPED
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


def test_the_next_one_begins_once_the_last_is_settled(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = made_of(memory)
    snapshots._newest = 1

    def wait(_: object) -> SimpleNamespace:
        host_memory.put_word(memory, SETTLED, 1)
        return SimpleNamespace(query=lambda: True)

    monkeypatch.setattr(torch.cuda, "current_stream", wait)
    assert snapshots._may_begin(2)
    assert snapshots.is_due(3)
