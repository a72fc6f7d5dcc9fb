"""What an agent tells, beside the events, of how far its ranks and their snapshots are."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitckpt.agent.progress import ProgressTeller
from jitckpt.events import EventLog
from jitckpt.ring import local_state
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import BEGUN, OFF, SAFE, put_word

RANKS = range(4)


@pytest.fixture
def memories() -> Iterator[dict[int, int]]:
    found = {rank: host_memory.create() for rank in RANKS}
    yield found
    for descriptor in found.values():
        os.close(descriptor)


def test_how_far_snapshots_are_is_read_from_the_ranks_memory(
    tmp_path: Path, memories: dict[int, int]
) -> None:
    rings = {rank: local_state.create() for rank in RANKS}
    teller = ProgressTeller(rings, EventLog(tmp_path), 3, memories)
    for ring in rings.values():
        os.close(ring)
    for rank, begun, safe, off in ((0, 0, 0, 0), (1, 5, 4, 0), (2, 4, 4, 0), (3, 4, 4, 1)):
        for word, value in ((BEGUN, begun), (SAFE, safe), (OFF, off)):
            put_word(memories[rank], word, value)
    teller._tell(tmp_path)
    told = json.loads((tmp_path / "progress-3.json").read_text())
    assert told["memory_states"] == {"1": "snap", "2": "completed"}, "the others are not kept in memory"
    teller.stop()


def test_without_a_memory_tier_there_are_none(tmp_path: Path) -> None:
    ring = local_state.create()
    teller = ProgressTeller({0: ring}, EventLog(tmp_path), 0)
    os.close(ring)
    teller._tell(tmp_path)
    assert json.loads((tmp_path / "progress-0.json").read_text())["memory_states"] == {}
    teller.stop()
