"""What a host's own ranks hold alike is not sent to it again, and what it keeps is whole all the same."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_host_memory import made
from test_protection import Agents

from jitckpt.saves.layout import Identity
from jitckpt.tiers import alike, host_memory
from jitckpt.tiers.host_memory import BEGUN, READY
from jitckpt.tiers.shard import CHUNK

PARAMETERS = os.urandom(3 * CHUNK)  # which all ranks hold
OWN = 2 * CHUNK  # bytes that each rank alone holds


@given(st.sets(st.integers(0, 40)), st.integers(1, 9))
def test_runs_and_what_they_leave_are_all(numbers: set[int], most: int) -> None:
    found = list(alike.runs(sorted(numbers), most))
    assert [number for run in found for number in run] == sorted(numbers)
    assert all(len(run) <= most for run in found)
    left = alike.missing(found, 41)
    assert [number for run in left for number in run] == sorted(set(range(41)) - numbers)
    assert all(one.stop < other.start for one, other in pairwise(left)), "in as few as can be"


@pytest.mark.parametrize("there", [[range(2, 2)], [range(3, 5)], [range(1, 3), range(2, 4)], [range(-1, 1)]])
def test_nobody_has_what_there_is_not(there: list[range]) -> None:
    with pytest.raises(ValueError, match="are none, or were there before"):
        alike.missing(there, 4)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with closing(Agents(str(tmp_path), 2)) as found:
        found.start()
        yield found


def put(agents: Agents, rank: int, step: int, own: bytes) -> None:
    memory = agents.tiers[rank].memory
    host_memory.put_word(memory.of(rank), READY, 1)
    host_memory.put_word(memory.of(rank), BEGUN, step)
    identity = Identity("job", "fingerprint", 2, rank, rank, 2)
    memory.put(made(step, PARAMETERS + own, identity=identity))


def sent(agents: Agents) -> list[int]:
    return [one._own[rank].size for rank, one in enumerate(agents.protections)]


def are_whole(agents: Agents, step: int, owns: list[bytes]) -> bool:
    states = [host_memory.read(tier.memory.of(rank), step)[1] for tier in agents.tiers for rank in range(2)]
    found = [state.tensors["big"].numpy().tobytes() for state in states]
    return found == 2 * [PARAMETERS + own for own in owns]


def test_replicated_parameters_are_not_sent_again(agents: Agents) -> None:
    for step in (1, 2, 3):
        owns = [os.urandom(OWN) for _ in range(2)]
        for rank in range(2):
            put(agents, rank, step, owns[rank])
        agents.until_safe(step)
        assert all(OWN < size < OWN + CHUNK for size in sent(agents))
        assert are_whole(agents, step, owns)


def test_a_snapshot_that_is_nearly_there_is_waited_for(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alike, "PATIENCE_SECONDS", 60.0)
    waits = threading.Event()
    looked = alike._is_made

    def noted(*said: Any) -> bool:
        if found := looked(*said):
            waits.set()
        return found

    monkeypatch.setattr(alike, "_is_made", noted)
    put(agents, 0, 1, bytes(OWN))
    late = agents.tiers[1].memory.of(1)
    for which, value in ((READY, 1), (BEGUN, 1)):
        host_memory.put_word(late, which, value)
    while not waits.is_set():
        agents.look()
        time.sleep(0.01)
    put(agents, 1, 1, b"other" + bytes(OWN))
    agents.until_safe(1)
    assert all(size < 3 * CHUNK for size in sent(agents))


def test_what_was_not_alike_is_not_waited_for(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        for rank in range(2):
            memory = agents.tiers[rank].memory
            host_memory.put_word(memory.of(rank), READY, 1)
            identity = Identity("job", "fingerprint", 2, rank, rank, 2)
            memory.put(made(step, os.urandom(CHUNK), identity=identity))
        agents.until_safe(step)
        monkeypatch.setattr(alike, "_is_made", lambda *_: pytest.fail("it is waited for"))


def test_what_is_damaged_there_is_sent(agents: Agents) -> None:
    put(agents, 1, 1, bytes(OWN))
    agents.flip(1, 1, 1)
    put(agents, 0, 1, b"other" + bytes(OWN))
    agents.until_safe(1)
    host_memory.check(agents.tiers[1].memory.of(0), 1)
    assert sent(agents)[0] > 3 * CHUNK, "a run is copied as a whole or not"
