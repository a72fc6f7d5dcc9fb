"""Torch's rendezvous over a store in which strangers write: nothing of theirs is run, or believed."""

import os
import pickle
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from jitckpt.hosts.rendezvous_state import PLACE, from_json, to_json, with_signature
from jitckpt.hosts.signed import ForeignError, Signature
from jitckpt.hosts.store_server import store_at

HERE = "127.0.0.1"
KEY = "torch.rendezvous.job"
OURS = Signature("job", b"what only this job's agents know")


class Attack:
    """What runs a program where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)

    def pickled(self) -> str:
        return b64encode(pickle.dumps(self)).decode()


class Agents:
    """Hosts of a job of two that meet at one store."""

    def __init__(self) -> None:
        self.store = store_at(HERE)
        self.handlers: list[Any] = []

    def add(self, signature: Signature | None = OURS) -> Any:
        """signature: None for torch's own rendezvous."""
        parameters = RendezvousParameters(
            "c10d", f"{HERE}:{self.store.port}", "job", 2, 2, HERE, is_host=False, join_timeout=60
        )
        handler = rendezvous_handler_registry.create_handler(parameters)
        self.handlers.append(handler if signature is None else with_signature(handler, signature))
        return self.handlers[-1]

    def meet(self) -> None:
        with ThreadPoolExecutor() as pool:
            infos = list(pool.map(lambda handler: handler.next_rendezvous(), self.handlers))
        assert sorted(info.rank for info in infos) == [0, 1]


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents()
    yield made
    for handler in made.handlers:
        handler._stop_heartbeats()


def test_torchs_own_would_run_it(agents: Agents, tmp_path: Path) -> None:
    """So that the tests below show something."""
    victim = agents.add(signature=None)
    agents.store.set(KEY, Attack(tmp_path / "trace").pickled())
    with pytest.raises((AttributeError, RendezvousError)):
        victim.is_closed()
    assert (tmp_path / "trace").exists()


ENTRIES = ["pickled", "no base64 !", "a", "\xe9", "", "unsigned", "of another secret"]


def entry(kind: str, trace: Path) -> str:
    if kind == "pickled":
        return Attack(trace).pickled()
    if kind in ("unsigned", "of another secret"):
        signature = Signature("job", None if kind == "unsigned" else b"another")
        closed = _RendezvousState()
        closed.closed = True
        return b64encode(signature.write(PLACE, to_json(closed)).encode()).decode()
    return kind


@pytest.mark.parametrize("kind", ENTRIES)
def test_what_a_stranger_has_written_before_is_put_away(
    agents: Agents, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    agents.store.set(KEY, entry(kind, tmp_path / "trace"))
    agents.add()
    agents.add()
    agents.meet()
    assert not (tmp_path / "trace").exists()
    told = capsys.readouterr().err
    if kind in ("pickled", "unsigned", "of another secret"):
        assert "in the rendezvous' store an entry was not signed" in told


@pytest.mark.parametrize("kind", ENTRIES)
def test_what_a_stranger_writes_later_is_put_away(agents: Agents, tmp_path: Path, kind: str) -> None:
    agents.add()
    agents.add()
    agents.meet()
    before = agents.handlers[0]._state_holder.state
    agents.store.set(KEY, entry(kind, tmp_path / "trace"))
    for handler in agents.handlers:
        handler._state_holder._last_sync_time = -1.0
        assert not handler.is_closed(), "as its state was when the agents wrote it last"
    assert not (tmp_path / "trace").exists()
    agents.meet()
    assert agents.handlers[0]._state_holder.state.round == before.round + 1, "keys of the last round are old"


def test_an_older_state_is_put_away_too(agents: Agents) -> None:
    agents.add()
    agents.add()
    agents.meet()
    older = agents.store.get(KEY).decode()
    agents.meet()
    agents.store.set(KEY, older)
    agents.meet()
    assert agents.handlers[0]._state_holder.state.round == 2


def test_hosts_with_two_secrets_are_told_so(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each puts away what the other has written, but not for ever."""
    monkeypatch.setattr("jitckpt.hosts.rendezvous_state.MOST_FOREIGN", 2)
    refused: list[str] = []

    def meet(handler: Any) -> None:
        try:
            handler.next_rendezvous()
        except RendezvousStateError as error:
            refused.append(str(error))

    handlers = [agents.add(), agents.add(Signature("job", b"another"))]
    threads = [threading.Thread(target=meet, args=(handler,)) for handler in handlers]
    for thread in threads:
        thread.start()
    while not refused:
        assert all(thread.is_alive() for thread in threads)
        time.sleep(0.01)
    third = Signature("job", b"a third")
    while any(thread.is_alive() for thread in threads):  # the one that is left
        agents.store.set(KEY, b64encode(third.write(PLACE, 0).encode()).decode())
        time.sleep(0.01)
    assert len(refused) == 2
    assert all("Again and again, in the rendezvous' store an entry was not signed" in one for one in refused)
    assert all("or a host has another --secret-file, or none" in one for one in refused)


def full_state() -> Any:
    state, now = _RendezvousState(), datetime.now(UTC)
    nodes = [_NodeDesc("10.0.0.1", 7, 0), _NodeDesc("10.0.0.2", 8, 1), _NodeDesc("10.0.0.3", 9, 2)]
    state.round, state.complete, state.deadline = 3, True, now
    state.participants = {nodes[0]: 1, nodes[1]: 0}
    state.wait_list, state.redundancy_list = {nodes[2]}, {nodes[1]}
    state.last_heartbeats = dict.fromkeys(nodes, now)
    return state


def test_a_state_comes_back_as_it_was() -> None:
    read = from_json(OURS.read(PLACE, OURS.write(PLACE, to_json(full_state())).encode()))
    assert vars(read) | {"last_heartbeats": 0, "deadline": 0} == vars(full_state()) | {
        "last_heartbeats": 0,
        "deadline": 0,
    }
    assert all(time.tzinfo is not None for time in read.last_heartbeats.values())


def test_a_torch_whose_state_has_more_is_refused() -> None:
    state: Any = full_state()
    state.something_new = 1
    with pytest.raises(RendezvousStateError, match="This version of torch"):
        to_json(state)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*vars(_RendezvousState()), "all", "one more"]), json_values)
def test_nonsense_is_no_state(part: str, value: Any) -> None:
    """Whoever may sign says what he likes, and is believed only if it makes sense."""
    told = value if part == "all" else to_json(full_state()) | {part: value}
    with suppress(ForeignError):
        state = from_json(told)
        assert vars(state).keys() == vars(_RendezvousState()).keys()
