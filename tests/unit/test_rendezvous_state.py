"""Torch's rendezvous over a store in which strangers write: nothing of theirs is run, or believed."""

import os
import pickle
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from jitckpt.hosts import rendezvous_state
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
        assert all(thread.is_alive() for thread in threads) or refused
        time.sleep(0.01)
    third = Signature("job", b"a third")
    while any(thread.is_alive() for thread in threads):  # the one that is left
        agents.store.set(KEY, b64encode(third.write(PLACE, 0).encode()).decode())
        time.sleep(0.01)
    assert len(refused) == 2
    assert all("Again and again, in the rendezvous' store an entry was not signed" in one for one in refused)
    assert all("or a host has another --secret-file, or none" in one for one in refused)


class Clocks(datetime):
    """The time of day, as the host of a thread has it."""

    ahead: ClassVar[dict[int, timedelta]] = {}

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) + cls.ahead.get(threading.get_ident(), timedelta())


@pytest.mark.parametrize("hours", [1, -1])
def test_hosts_meet_whatever_their_clocks_show(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Torch takes a host for dead by the time that the other's clock has shown."""
    for module in (dynamic_rendezvous, rendezvous_state):
        monkeypatch.setattr(module, "datetime", Clocks)
    monkeypatch.setattr(Clocks, "ahead", {})
    right, wrong = agents.add(), agents.add()

    def meet_with_a_wrong_clock() -> Any:
        Clocks.ahead[threading.get_ident()] = timedelta(hours=hours)
        return wrong.next_rendezvous()

    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            infos = [pool.submit(right.next_rendezvous), pool.submit(meet_with_a_wrong_clock)]
            ranks = [info.result().rank for info in infos]
        assert sorted(ranks) == [0, 1]
        assert [info.result().world_size for info in infos] == [2, 2]


def test_a_host_is_dead_once_its_heartbeats_end_and_alive_as_long_as_they_come(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = agents.add()._state_holder
    silent, alive = _NodeDesc("10.0.0.1", 7, 0), _NodeDesc("10.0.0.2", 8, 0)
    state, long_ago, seconds = _RendezvousState(), datetime(2000, 1, 1, tzinfo=UTC), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    state.participants = {silent: 0, alive: 1}
    state.last_heartbeats = {silent: long_ago + timedelta(days=36500), alive: long_ago}
    holder._state = state
    for number in range(6):
        holder._sanitize()
        expected = {silent, alive} if number <= 3 else {alive}
        assert set(holder.state.participants) == expected, "15 s without a heartbeat"
        state.last_heartbeats[alive] = long_ago + timedelta(seconds=number)
        seconds += 4.0


def test_a_clock_that_is_set_back_stops_no_heartbeat(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = agents.add()
    holder, node, seconds = handler._state_holder, handler._this_node, 100.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    before = datetime.now(UTC) + timedelta(hours=1)
    holder._state.last_heartbeats = {node: before}
    holder._sanitize()
    context: Any = SimpleNamespace(state=holder.state, node=node, settings=handler.settings)
    assert not dynamic_rendezvous._should_keep_alive(context)
    seconds += 6.0
    holder._state.last_heartbeats = {node: before}  # as it is read again
    holder._sanitize()
    assert dynamic_rendezvous._should_keep_alive(context)


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
