"""Where the agents of several hosts, all in this process, go when the rendezvous' store is lost."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.decisions.quorum import missing
from jitckpt.errors import HostsError, HostsMissing, NotNeeded
from jitckpt.hosts import connections, limited_calls, stores
from jitckpt.hosts.connections import Hosts
from jitckpt.hosts.limited_calls import within
from jitckpt.hosts.store_server import store_at
from jitckpt.hosts.stores import Apart, LastingRendezvous, LastStart, StoreGone, StorePlace, is_closed
from jitckpt.wire.hosts import STORE, Host, Past
from jitckpt.wire.moves import JobFacts

HERE = "127.0.0.1"
AGENTS: list[LastingRendezvous] = []  # of the test that runs


def config(port: int, count: int, join_timeout: int = 60) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=count,
        max_nodes=count,
        nproc_per_node=1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HERE}:{port}",
        rdzv_configs={"join_timeout": join_timeout},
        local_addr=HERE,
    )


def agent(
    port: int, count: int, inner: Any = None, patience: float = 60.0, join_timeout: int = 60
) -> LastingRendezvous:
    """Return an agent that has no store at the endpoint itself."""
    settings = config(port, count, join_timeout)
    parameters = RendezvousParameters("c10d", f"{HERE}:{port}", "job", count, count, HERE, is_host=False)
    rendezvous = LastingRendezvous(
        settings, inner or rendezvous_handler_registry.create_handler(parameters), patience
    )
    rendezvous.has_store = False
    AGENTS.append(rendezvous)
    return rendezvous


def close_agents() -> None:
    while AGENTS:
        ended = AGENTS.pop()
        ended.close()
        within(60.0, ended.inner._stop_heartbeats)


@pytest.fixture(autouse=True)
def end() -> Iterator[None]:
    yield
    close_agents()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool
        close_agents()  # one that still waits for others, as a test has failed, would wait for ever


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which nobody listens, nor can."""
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        yield taken.getsockname()[1]


class LastStarts:
    """Agents as hosts 1, 2 ... of a start of whom host 0, with the store, is lost."""

    def __init__(self) -> None:
        self.met: list[Hosts] = []

    def __call__(self, agents: list[LastingRendezvous], threads: ThreadPoolExecutor) -> list[Hosts]:
        told = [Host(HERE, 1, (0,), 0, reserve=1, has_store=True)]
        told += [
            Host(HERE, 1, (place,), 0, reserve=one.reserve(), agent=one.agent)
            for place, one in enumerate(agents, 1)
        ]
        start = sha256(json.dumps([(host.address, host.port) for host in told]).encode()).hexdigest()
        agents[0].signature.put(agents[0].inner._store, "start/agreed/0", start)
        all_agree = [
            threads.submit(one.agree, told, place, one.inner._store, "start")
            for place, one in enumerate(agents, 1)
        ]
        for one in all_agree:
            one.result()
        for place in range(1, len(told)):
            self.met.append(Hosts(place, told, connections.listen(HERE), b"secret", 60.0))
            agents[place - 1].begin(self.met[-1], silent_are_dead=False)
            self.met[-1]._lost.add(0)
        return self.met


@pytest.fixture
def last_start() -> Iterator[LastStarts]:
    starts = LastStarts()
    yield starts
    for met in starts.met:
        met.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def meet(*waiting: "Future[Any]") -> None:
    """See that all have met at one store."""
    infos = [one.result(60) for one in waiting]
    assert sorted(info.rank for info in infos) == list(range(len(infos)))
    for info in infos:
        info.store.set(f"met/{info.rank}", "yes")
    for info in infos:
        assert [info.store.get(f"met/{rank}") for rank in range(len(infos))] == [b"yes"] * len(infos)


def test_those_that_are_left_meet_at_the_first_ones_store_with_who_stands_by(
    threads: ThreadPoolExecutor, last_start: LastStarts, capsys: pytest.CaptureFixture[str]
) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    port = store.port
    first, second, stands_by = (agent(port, 3) for _ in range(3))
    lasts = last_start([first, second], threads)
    waiting = threads.submit(stands_by.next_rendezvous)
    while not stands_by._reserves:
        assert not waiting.done()
        time.sleep(0.01)
    del store
    others = []
    for one, met in zip((second, first), reversed(lasts), strict=True):
        one.failed(met, [], silent_are_dead=False)
        others.append(threads.submit(one.next_rendezvous))
    meet(waiting, *others)
    assert "The store is at 127.0.0.1:" in capsys.readouterr().err
    assert (first.has_store, second.has_store, stands_by.has_store) == (True, False, False)
    pasts = [past for one in (first, second, stands_by) for past in one.pasts(0)]
    assert missing(pasts) is None
    assert missing(list(stands_by.pasts(0))) == (0, 3), "new hosts alone do not go on: the store says why"

    # Another host is started at the first address, with a store of its own: it finds its way, and stands by.
    again = TCPStore(HERE, port, is_master=True, wait_for_workers=False)
    late = agent(port, 3)
    waiting = threads.submit(late.next_rendezvous)
    while late._place != first._place:
        assert not waiting.done()
        time.sleep(0.01)
    assert again.check(["jitckpt/job/moved"])
    # What the store has: what the agent itself holds may not have been written yet.
    while not late.inner._state_holder._known["redundancy_list"]:
        assert not waiting.done()
        time.sleep(0.01)
    assert first.shutdown()
    with pytest.raises(NotNeeded):
        waiting.result(60)


def test_who_comes_just_as_the_job_ends_is_not_needed(
    threads: ThreadPoolExecutor, last_start: LastStarts
) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second = (agent(store.port, 2) for _ in range(2))
    last_start([first, second], threads)
    assert first.shutdown()
    with pytest.raises(NotNeeded):
        agent(store.port, 2).next_rendezvous()


def test_a_job_that_never_began_is_not_said_to_have_ended() -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    assert agent(store.port, 2).shutdown()
    with pytest.raises(RendezvousClosedError):
        agent(store.port, 2).next_rendezvous()


def test_who_comes_in_a_hosts_place_meets_the_others_as_that_host(
    threads: ThreadPoolExecutor, last_start: LastStarts
) -> None:
    """All meet at its store once the other is lost, who stands by, too."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    left, second, stands_by, new = (agent(store.port, 3) for _ in range(4))
    lasts = last_start([left, second], threads)
    waiting = threads.submit(stands_by.next_rendezvous)
    until(lambda: stands_by._reserves)
    reserve = store_at(HERE)
    coming = replace(lasts[0].all[1], reserve=reserve.port)
    every = (lasts[0].all[0], coming, lasts[0].all[2])
    met = Hosts(1, every, connections.listen(HERE), b"secret", 60.0, takes_place=True)
    left.hand_over()
    new.take_place(met, JobFacts("run", 0, (HERE, 1), past=left.start), reserve)
    lasts[1].all = every
    until(lambda: StorePlace(HERE, reserve.port) in stands_by._reserves)
    met._lost.add(0)
    del store
    others = []
    for one, last in ((second, lasts[1]), (new, met)):
        one.failed(last, [], silent_are_dead=False)
        others.append(threads.submit(one.next_rendezvous))
    meet(waiting, *others)
    assert [one.result().rank for one in (waiting, *others)] == [0, 2, 1]
    assert new.has_store
    met.close()


def test_who_has_handed_over_is_not_waited_for(threads: ThreadPoolExecutor) -> None:
    """Else the others would meet only once it seems dead."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, third = (agent(store.port, 2) for _ in range(3))
    meet(*(threads.submit(one.next_rendezvous) for one in (first, second)))
    second.hand_over()
    third.num_nodes_waiting()  # which reads the state
    assert [one.local_id for one in third.inner._state_holder.state.participants] == [int(first.agent, 16)]


def test_two_that_do_not_see_each_other_give_way_to_the_first(
    threads: ThreadPoolExecutor, last_start: LastStarts
) -> None:
    """A link between them was cut: each has given a store, and the third goes to one of them."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, third = (agent(store.port, 3) for _ in range(3))
    lasts = last_start([first, second, third], threads)
    lasts[0]._lost.add(2)
    lasts[1]._lost.add(1)
    del store
    waiting = []
    for one, met in zip((second, first, third), (lasts[1], lasts[0], lasts[2]), strict=True):
        one.failed(met, [], silent_are_dead=True)
        waiting.append(threads.submit(one.next_rendezvous))
        if one is second:
            while not second.has_store:
                time.sleep(0.01)
    meet(*waiting)
    assert (first.has_store, second.has_store, third.has_store) == (True, False, False)


def test_who_is_told_where_the_others_are_gives_no_store(
    threads: ThreadPoolExecutor, last_start: LastStarts
) -> None:
    """Its own is there, but the others have taken it for lost, and left a note in it."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, third = (agent(store.port, 3) for _ in range(3))
    lasts = last_start([first, second, third], threads)
    lasts[0]._lost.update({2, 3})
    for met in lasts[1:]:
        met._lost.add(1)
    elsewhere = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    second._place = third._place = StorePlace(HERE, 1)  # which is gone
    waiting = []
    for one, met in zip((second, third), lasts[1:], strict=True):
        one.failed(met, [], silent_are_dead=True)
        waiting.append(threads.submit(one.next_rendezvous))
    while not store.check(["jitckpt/job/moved"]):
        time.sleep(0.01)
    first.failed(lasts[0], [], silent_are_dead=True)
    waiting.append(threads.submit(first.next_rendezvous))
    meet(*waiting)
    assert (first.has_store, second.has_store) == (False, True)
    del elsewhere, store


def test_who_stands_by_ends_when_all_hosts_have_ended(threads: ThreadPoolExecutor, free_port: int) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, stands_by = (agent(store.port, 2) for _ in range(3))
    meet(*(threads.submit(one.next_rendezvous) for one in (first, second)))
    told = {"start": asdict(Past("start", 0, 2, STORE, 0)), "reserves": [[HERE, free_port]] * 2}
    stands_by.signature.put(store, stands_by._key("start"), told)
    waiting = threads.submit(stands_by.next_rendezvous)
    until(lambda: stands_by._reserves and stands_by.inner._state_holder.state.redundancy_list)
    del store
    with pytest.raises(NotNeeded, match="The job has ended; this host stood by"):
        waiting.result(60)


def test_who_stands_by_does_not_wait_long_for_hosts_that_are_dead(
    threads: ThreadPoolExecutor, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is there, on a host that stands by itself, and nobody has said that the job has ended."""
    monkeypatch.setattr(stores, "DEAD_SECONDS", 3)
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    living = socket.create_server((HERE, 0))
    first, second = (agent(store.port, 2, join_timeout=3600) for _ in range(2))
    told = {"start": asdict(Past("start", 0, 2, STORE, 0))}
    places = [[HERE, free_port], [HERE, living.getsockname()[1]]]
    first.signature.put(store, first._key("start"), told | {"reserves": places})
    waiting = [threads.submit(one.next_rendezvous) for one in (first, second)]
    until(lambda: len(first.inner._state_holder.state.wait_list) == 2)
    time.sleep(4)
    assert not any(one.done() for one in waiting), "one of them may be there: somebody listens"
    living.close()
    for one in waiting:
        with pytest.raises(HostsMissing, match="All hosts that had the job's state are gone"):
            one.result(60)
    assert not first.shutdown()
    assert not first.inner._state_holder.state.closed, "nobody has ended the job"


def test_who_saw_the_hosts_die_does_not_take_the_job_for_done_when_the_store_goes_too(
    threads: ThreadPoolExecutor, free_port: int
) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    stands_by = agent(store.port, 2)
    told = {"start": asdict(Past("start", 0, 2, STORE, 0)), "reserves": [[HERE, free_port]] * 2}
    stands_by.signature.put(store, stands_by._key("start"), told)
    waiting = threads.submit(stands_by.next_rendezvous)
    until(lambda: stands_by._dead_since)
    del store
    with pytest.raises(HostsMissing, match="All hosts that had the job's state are gone"):
        waiting.result(60)


def test_who_may_be_cut_off_waits_and_ends_in_time(
    threads: ThreadPoolExecutor, last_start: LastStarts, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of three sees nobody: the others may have gone on."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    one, other = (agent(store.port, 3, join_timeout=1) for _ in range(2))
    met, _ = last_start([one, other], threads)
    met._lost.add(2)
    del store
    one.failed(met, [], silent_are_dead=False)
    with pytest.raises(HostsError, match=r"In 1 s no host with the address 127.0.0.1 has come"):
        one.next_rendezvous()
    assert "this host sees 1 of 3 hosts that may be alive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("least", "told"),
    [
        (3, "it takes the place of one that is lost, when the others meet again"),
        (2, "the job goes on without it, and takes it in at the end of a step"),
    ],
)
def test_who_comes_as_hosts_are_missing_is_told_what_it_waits_for(
    free_port: int, capsys: pytest.CaptureFixture[str], least: int, told: str
) -> None:
    """A job that needs all its hosts does not go on without it."""
    inner: Any = SimpleNamespace(wait_for_missing=lambda seconds: None, _stop_heartbeats=lambda: None)
    late: Any = agent(free_port, 3, inner)
    late._config = replace(late._config, min_nodes=least)
    late._read = lambda: stores.Notes(None, Past("start", 0, 3, STORE, 0), [])
    late._is_redundant, late._is_waiting = lambda: False, lambda: True
    late._look()
    late._look()
    assert capsys.readouterr().err == f"jitckpt: this host waits: {told}.\n"


def test_who_is_left_alone_by_dead_hosts_does_not_wait_long_for_new_ones(
    threads: ThreadPoolExecutor, last_start: LastStarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three: the second is gone before the next start is agreed on, and its machine says so."""
    monkeypatch.setattr(stores, "DEAD_SECONDS", 0.5)
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    one, other = (agent(store.port, 3, join_timeout=3600) for _ in range(2))
    met, _ = last_start([one, other], threads)
    met._lost.add(2)
    del store
    one.failed(met, [], silent_are_dead=False)
    assert not one._is_alone(), "the other's store in reserve is there: it may be cut off"
    other._reserve = None
    with pytest.raises(HostsError, match="The other hosts are dead, as their machines say"):
        one.next_rendezvous()


def test_of_two_hosts_the_one_that_is_left_waits_for_the_address(
    threads: ThreadPoolExecutor, last_start: LastStarts, capsys: pytest.CaptureFixture[str]
) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    port = store.port
    one = agent(port, 2)
    (met,) = last_start([one], threads)
    del store
    one.failed(met, [], silent_are_dead=False)
    waiting = threads.submit(one.next_rendezvous)
    told = ""
    while "or on another that takes the address 127.0.0.1. It waits" not in told:
        assert not waiting.done()
        told += capsys.readouterr().err
        time.sleep(0.01)
    again = TCPStore(HERE, port, is_master=True, wait_for_workers=False)
    new = threads.submit(agent(port, 2).next_rendezvous)
    meet(waiting, new)
    assert again.check(["torch.rendezvous.job"])
    assert missing(list(one.pasts(0))) is None


def test_a_silent_host_is_dead_where_the_user_says_so(
    threads: ThreadPoolExecutor, last_start: LastStarts
) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    one, other = (agent(store.port, 3) for _ in range(2))
    met, _ = last_start([one, other], threads)
    met._lost.add(2)
    assert one.start is not None
    assert not LastStart(one.start, met, frozenset(), silent_are_dead=False).may_move
    assert LastStart(one.start, met, frozenset(), silent_are_dead=True).may_move
    assert LastStart(one.start, met, frozenset({0, 2}), silent_are_dead=False).may_move, "they said they end"
    met._lost.add(3)  # that had come for a host's ranks, and is none of those that met
    assert LastStart(one.start, met, frozenset(), silent_are_dead=True).ended == {0, 2}


@pytest.mark.parametrize("hears", [False, True], ids=["nobody knows", "one knows"])
def test_a_store_that_is_lost_while_all_agree_costs_no_wait(
    threads: ThreadPoolExecutor, last_start: LastStarts, hears: bool
) -> None:
    """Host 0 is lost, with the store, once both others have agreed; one of them may know that all have."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    one, other = (agent(store.port, 3) for _ in range(2))
    lasts = last_start([one, other], threads)
    for agreeing, met in zip((one, other), lasts, strict=True):
        agreeing.failed(met, [], silent_are_dead=False)
        agreeing._patience = 1.0  # from now on no answer is what is looked for
        assert agreeing.reserve() == met.all[met.index].reserve, "where the others look for it"
    told = [replace(host, pasts=one.pasts(1)) for host in lasts[0].all]
    waiting = [threads.submit(other.agree, told, 2, other.inner._store, "again")]
    start = one.signature.take(store, "again/agreed/2")
    if hears:
        for place in (0, 2):
            one.signature.put(store, f"one hears/agreed/{place}", start)
        one.agree(told, 1, one.inner._store, "one hears")
        alone = Hosts(1, told, connections.listen(HERE), b"secret", 60.0)
        last_start.met.append(alone)
        alone._lost.update({0, 2})
        with pytest.raises(Apart, match="of 3 hosts that agreed to start only 1 are left"):
            one.begin(alone, silent_are_dead=False)
    else:
        waiting.append(threads.submit(one.agree, told, 1, one.inner._store, "again"))
        assert one.signature.take(store, "again/agreed/1") == start
    del store
    for agreed in waiting:
        with pytest.raises((StoreGone, DistError)):
            agreed.result(60)
    new = agent(one.reserve(), 3)
    meet(*(threads.submit(left.next_rendezvous) for left in (other, one, new)))
    assert [len(left.pasts(1)) for left in (one, other)] == [1 if hears else 2, 2]
    assert missing([*one.pasts(1), *other.pasts(1)], {one.agent, other.agent, new.agent}) is None
    assert missing(other.pasts(1), {other.agent}) == (1, 3), "the others may have gone on"


def test_no_call_to_a_store_that_never_answers_is_waited_for() -> None:
    """As a process that is stopped: its kernel takes the connection, and that is all."""

    class Inner:
        _store = None

        def next_rendezvous(self) -> None:
            threading.Event().wait()

        def _stop_heartbeats(self) -> None:
            pass

        class _state_holder:
            class _backend:
                pass

        shutdown = next_rendezvous

    with connections.listen(HERE) as stopped:
        one = agent(stopped.getsockname()[1], 2, inner=Inner(), patience=1.0, join_timeout=1)
        assert one.shutdown() is False
        with pytest.raises(HostsError, match=r"In 1 s no host"):
            one.next_rendezvous()


# A call to a store fails while the interpreter ends.
ENDING = """
import sys, threading, time, types
from datetime import timedelta
from jitckpt.hosts import limited_calls
from jitckpt.cli import run
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", store.port, wait_for_workers=False, timeout=timedelta(seconds=300))
calling = threading.Event()

def call():
    calling.set()
    client.get("never")

class Late:
    def __init__(self):
        self.store = store

    def __del__(self, sleep=time.sleep):
        del self.store  # which ends the call
        sleep(4)

late = sys.modules["late"] = types.ModuleType("late")
late.object = Late()
del late, store
limited_calls._in_thread(call, limited_calls.queue.SimpleQueue())
calling.wait()
print("ends")
if sys.argv[1] == "run":
    sys.exit(run._ended(7))
sys.exit(7)
"""


def test_a_call_that_is_out_does_not_change_how_the_job_ends() -> None:
    """The interpreter's own end would: what is shown first, so that the second part shows something."""
    command = [sys.executable, "-c", ENDING]
    ends = [
        subprocess.run([*command, way], check=False, capture_output=True, text=True, timeout=300)
        for way in ("interpreter", "run")
    ]
    assert [end.stdout for end in ends] == ["ends\n", "ends\n"]
    assert [end.returncode for end in ends] == [-signal.SIGABRT, 7]


def test_a_call_that_ends_in_time_says_what_came_of_it() -> None:
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, lambda: dict[str, int]()["x"])
    with pytest.raises(TimeoutError):
        within(0.01, threading.Event().wait)


def test_a_call_is_forgotten_once_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_calls, "LOOK_SECONDS", 0.01)
    looked = []

    def look() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise StoreGone("gone")

    never = threading.Event()
    with pytest.raises(StoreGone):
        limited_calls.watched(never.wait, look)
    never.set()
    assert len(looked) == 3
    assert limited_calls.watched(lambda: 7, look)() == 7
    with pytest.raises(KeyError):
        limited_calls.watched(lambda: dict[str, int]()["x"], look)()


def test_only_who_is_refused_is_closed(free_port: int) -> None:
    assert is_closed(StorePlace(HERE, free_port))
    with connections.listen(HERE) as alive:
        assert not is_closed(StorePlace(HERE, alive.getsockname()[1]))


def test_who_waits_is_seen_although_all_that_run_were_taken_for_dead(threads: ThreadPoolExecutor) -> None:
    """Under load no heartbeat of theirs comes in time: torch begins another meeting, of who waits alone."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    running = [agent(store.port, 2) for _ in range(2)]
    meet(*(threads.submit(one.next_rendezvous) for one in running))
    assert running[0].waiting() == frozenset()
    parameters = RendezvousParameters(
        *("c10d", f"{HERE}:{store.port}", "job", 2, 2, HERE), keep_alive_interval=1, join_timeout=60
    )
    late = agent(store.port, 2, rendezvous_handler_registry.create_handler(parameters))
    for one in running:
        one.inner._stop_heartbeats()
    waiting = threads.submit(late.next_rendezvous)
    until(lambda: running[0].waiting() and not running[0].inner._state_holder.state.complete)
    assert running[0].waiting() == {str(late.inner._this_node)}
    assert running[0].shutdown()
    with pytest.raises(RendezvousClosedError):
        waiting.result(60)


def test_those_that_stand_by_wait_for_all_that_are_left(
    threads: ThreadPoolExecutor, last_start: LastStarts
) -> None:
    """They are as many as there are places, and come first."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, *new = (agent(store.port, 3) for _ in range(5))
    lasts = last_start([first, second], threads)
    standing = [threads.submit(one.next_rendezvous) for one in new]

    def state() -> Any:
        return new[0].inner._state_holder.state

    until(lambda: len(state().wait_list) == 3)
    left = []
    for one, met in zip((first, second), lasts, strict=True):
        one.failed(met, [], silent_are_dead=False)
        left.append(threads.submit(one.next_rendezvous))
        if one is first:
            until(lambda: len(state().participants) == 1)
            time.sleep(3)
            assert len(state().participants) == 1, "the second is left, too"
    done = wait(standing, 60, FIRST_COMPLETED).done
    assert len(done) == 1
    meet(*left, *done)
    assert [one.result().rank for one in (*done, *left)] == [0, 1, 2], "the new one has the lost one's place"
    # The others stand by again, and one that ends, for whatever reason, ends nobody's job.
    until(lambda: len(state().redundancy_list) == 2)
    one, other = (one for one, waiting in zip(new, standing, strict=True) if not waiting.done())
    assert not one.shutdown()
    assert not first.is_closed()
    assert first.shutdown()
    with pytest.raises(NotNeeded):
        standing[new.index(other)].result(60)


def test_a_spare_has_no_part_in_the_first_start(threads: ThreadPoolExecutor) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, spare = (agent(store.port, 2) for _ in range(3))
    spare._is_spare = True
    waiting = threads.submit(spare.next_rendezvous)
    until(lambda: spare.inner._state_holder.state.wait_list)
    meet(*(threads.submit(one.next_rendezvous) for one in (first, second)))
    until(lambda: spare.inner._state_holder.state.redundancy_list)
    assert not waiting.done()
    assert first.shutdown()
    with pytest.raises(NotNeeded):
        waiting.result(60)


def test_no_more_stand_by_than_are_wanted(threads: ThreadPoolExecutor) -> None:
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    first, second, *others = (agent(store.port, 2) for _ in range(4))
    meet(*(threads.submit(one.next_rendezvous) for one in (first, second)))
    told = {"start": asdict(Past("start", 0, 2, STORE, 0)), "reserves": [[HERE, 1]] * 2}
    first.signature.put(store, first._key("start"), told)
    for one in others:
        one._max_standby = 1
    waiting = [threads.submit(one.next_rendezvous) for one in others]
    (surplus,) = wait(waiting, 60, FIRST_COMPLETED).done
    with pytest.raises(NotNeeded, match="as many stand by as are to"):
        surplus.result()
    assert not others[waiting.index(surplus)].shutdown(), "the job goes on without it"
    assert not first.is_closed()
    assert first.shutdown()
    (other,) = (one for one in waiting if one is not surplus)
    with pytest.raises(NotNeeded, match="The job has ended"):
        other.result(60)
