"""What the agent does by itself: rank-local states from the rings of its workers, and its restarts."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.agent.agent import Agent, _check_quorum
from jitckpt.agent.local_state_saves import write_local_states
from jitckpt.agent.memory_tier import ToCutAnew
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.states_at_death import StatesAtDeath
from jitckpt.agent.worker_processes import WorkerProcesses
from jitckpt.encoding import tree_codec
from jitckpt.errors import HostsError
from jitckpt.events import EventLog
from jitckpt.hosts import limited_calls
from jitckpt.hosts.stores import Apart, StoreGone
from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.wire.hosts import Host, Past

DEAD = Identity(job="j", fingerprint="f", world_size=2, rank=1, shard=0, shards=1)
HEALTHY = replace(DEAD, rank=0)


@pytest.fixture
def dead_worker() -> Iterator[Worker]:
    """A rank that has ended and left the states of steps 5 to 8 in its ring."""
    worker = Worker(
        rank=1,
        command=["true"],
        environment=os.environ,
        ring_fd=local_state.create(),
        stdout=None,
        stderr=None,
    )
    recorder = Recorder(Ring(worker.ring_fd, DEAD, 4, 2 << 20), lambda *_: None, print)
    for step in range(1, 9):
        recorder.write(step, final=True, parts={"random": tree_codec.encode({"step": step}, "random")})
    worker.reap()
    yield worker
    worker.close()


def save(directory: Path, step: int, whole: bool = True) -> None:
    with SaveFolder(directory, HEALTHY, step, "rank", "builtin") as folder:
        folder.add_tensors("tensors.safetensors", {"weight": torch.ones(2)})
        folder.commit()
    if not whole:
        (directory / layout.step_folder(step) / "rank-00000" / "metadata.json").unlink()


def local_steps(directory: Path) -> list[int]:
    return sorted(
        record.step for record in folders.find(directory) if record.kind == "local" and record.rank == 1
    )


def test_the_dead_ranks_state_is_written_for_what_others_saved(dead_worker: Worker, tmp_path: Path) -> None:
    save(tmp_path, 7)
    written = write_local_states(dead_worker.ring_fd, tmp_path, set())
    assert list(written) == [7]
    assert written[7] > 0
    assert local_steps(tmp_path) == [7]
    (local,) = [record for record in folders.find(tmp_path) if record.kind == "local"]
    assert folders.verify(local) is None


def test_a_save_that_nobody_could_report_counts_too(dead_worker: Worker, tmp_path: Path) -> None:
    """Its rank was ended between the end of the save and the report; a restart would take it."""
    save(tmp_path, 7)
    save(tmp_path, 8)
    assert list(write_local_states(dead_worker.ring_fd, tmp_path, set())) == [7, 8]


def test_unfinished_saves_and_steps_long_gone_do_not_count(dead_worker: Worker, tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 8, whole=False)
    assert write_local_states(dead_worker.ring_fd, tmp_path, set()) == {}


def test_a_step_that_was_saved_on_another_host_counts_too(dead_worker: Worker, tmp_path: Path) -> None:
    assert list(write_local_states(dead_worker.ring_fd, tmp_path, {6, 1000})) == [6]
    assert local_steps(tmp_path) == [6]


def test_where_a_host_is_missed_every_state_is_written(dead_worker: Worker, tmp_path: Path) -> None:
    """A host that is cut off only may save a step by itself, and fetch what it lacks when it is back."""
    save(tmp_path, 7)
    assert list(write_local_states(dead_worker.ring_fd, tmp_path, set(), "", True)) == [7]
    assert local_steps(tmp_path) == [5, 6, 7, 8]


def test_a_copy_is_written_beside_what_the_host_itself_writes(dead_worker: Worker, tmp_path: Path) -> None:
    """A host that is cut off only, and the one that keeps its copy, in a directory that both share."""
    save(tmp_path, 7)
    with SaveFolder(tmp_path, DEAD, 7, "local", "ring") as folder:
        folder.add_json("state.json", {})
        assert list(write_local_states(dead_worker.ring_fd, tmp_path, set(), "copy")) == [7]
        assert (folder.path / "state.json").exists()


def test_a_dead_ranks_states_are_written_at_once(dead_worker: Worker, tmp_path: Path) -> None:
    at_death = StatesAtDeath()
    for _ in range(2):  # the second notice of the same death
        at_death.write(1, dead_worker.ring_fd, tmp_path)
    for thread in at_death._threads.values():
        thread.join()
    assert local_steps(tmp_path) == [5, 6, 7, 8]
    save(tmp_path, 7)
    assert write_local_states(dead_worker.ring_fd, tmp_path, set())[7] > 0
    assert local_steps(tmp_path) == [7]
    assert [path.name for path in tmp_path.iterdir()] == [layout.step_folder(7)]


def test_what_was_written_at_a_death_is_a_draft(tmp_path: Path) -> None:
    """A rank that an exception ends lives a while: its device goes on, and writes more of its own state."""

    def mean(of: float) -> dict[str, tree_codec.Encoded]:
        return {"buffers": tree_codec.encode({"mean": torch.full((3,), of)}, "buffers")}

    with os.fdopen(local_state.create()) as ring:
        recorder = Recorder(Ring(ring.fileno(), DEAD, 4, 2 << 20), lambda *_: None, print)
        recorder.write(7, final=False, parts=mean(1.0))
        at_death = StatesAtDeath()
        at_death.write(1, ring.fileno(), tmp_path)
        at_death._threads[1].join()
        at_death.finish()
        assert local_steps(tmp_path) == [7]
        recorder.write(7, final=True, parts=mean(2.0))
        save(tmp_path, 7)
        # Who has but a copy, and that may be older, leaves it as it is.
        assert write_local_states(ring.fileno(), tmp_path, set(), "copy") == {7: 0}
        assert write_local_states(ring.fileno(), tmp_path, set())[7] > 0
        assert write_local_states(ring.fileno(), tmp_path, set()) == {7: 0}
    (local,) = [record for record in folders.find(tmp_path) if record.kind == "local"]
    assert folders.read(local).tensors["buffers.mean"].tolist() == [2.0] * 3


def test_a_disk_that_takes_no_state_of_a_dead_rank_is_no_matter(dead_worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    at_death = StatesAtDeath()
    at_death.write(1, dead_worker.ring_fd, tmp_path / "file")
    at_death.close()
    assert write_local_states(dead_worker.ring_fd, tmp_path, set()) == {}


def test_what_is_there_whole_is_not_written_again(dead_worker: Worker, tmp_path: Path) -> None:
    """By the rank's host, or by the one that keeps a copy; what is damaged is replaced."""
    save(tmp_path, 7)
    assert write_local_states(dead_worker.ring_fd, tmp_path, set(), "copy")[7] > 0
    assert write_local_states(dead_worker.ring_fd, tmp_path, set()) == {7: 0}
    (local,) = [record for record in folders.find(tmp_path) if record.kind == "local"]
    (local.path / "state.json").write_text("{}")
    assert write_local_states(dead_worker.ring_fd, tmp_path, set())[7] > 0
    assert folders.verify(local) is None


def test_of_two_hosts_that_write_the_same_at_once_the_first_has_written_it(
    dead_worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between this one's look and its last rename comes the other, in a directory that both share."""
    save(tmp_path, 7)
    commit = SaveFolder.commit

    def commit_second(folder: SaveFolder) -> tuple[Path, int]:
        monkeypatch.setattr(SaveFolder, "commit", commit)
        exists, there = Path.exists, folder.path.with_name("local-00001")
        monkeypatch.setattr(Path, "exists", lambda path: path != there and exists(path))
        local_state.write_save(dead_worker.ring_fd, tmp_path, 7, "first")
        return folder.commit()

    monkeypatch.setattr(SaveFolder, "commit", commit_second)
    assert list(write_local_states(dead_worker.ring_fd, tmp_path, set(), "copy")) == [7]
    monkeypatch.undo()
    (local,) = [record for record in folders.find(tmp_path) if record.kind == "local"]
    assert folders.verify(local) is None
    assert [path.name for path in local.path.parent.iterdir() if "unfinished" in path.name] == []


def test_what_an_earlier_start_has_written_is_not_lost(dead_worker: Worker, tmp_path: Path) -> None:
    """A second failure comes before the first step after a restart: the new ring has nothing yet."""
    save(tmp_path, 7)
    write_local_states(dead_worker.ring_fd, tmp_path, set())
    fresh = local_state.create()
    Ring(fresh, DEAD, 4, 2 << 20)
    other = local_state.create()
    Ring(other, HEALTHY, 4, 2 << 20)
    assert write_local_states(fresh, tmp_path, {7}) == {7: 0}
    assert write_local_states(other, tmp_path, {7}) == {}, "that is another rank's"
    os.close(fresh)
    os.close(other)


def test_too_few_of_the_last_start_do_not_go_on() -> None:
    """One of three was cut off, and has found two new hosts: the other two may have done so as well."""
    new = [Host("10.0.0.2", 1, (place,), 0) for place in (1, 2)]
    cut_off = Host("10.0.0.1", 1, (0,), 1, pasts=(Past("start", 0, 3, 0, 0),))
    with pytest.raises(HostsError, match=r"Only 1 of 3 hosts that may be alive have come together"):
        _check_quorum([cut_off, *new])
    _check_quorum([replace(cut_off, pasts=(Past("start", 0, 3, 0, 0, ended=(1,)),)), *new])


def test_a_host_alone_starts_its_ranks_again_without_another_rendezvous() -> None:
    """Torch's waits at random for up to 0.3 s before it does anything."""

    class Handler:
        use_agent_store = True

        def next_rendezvous(self) -> None:
            raise AssertionError("there is nobody to meet")

    agent = Agent.__new__(Agent)
    agent._config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
    settings: Any = SimpleNamespace(health_check=None)
    agent._settings = settings
    agent._signals = []
    agent._processes = WorkerProcesses.__new__(WorkerProcesses)
    agent._rendezvous(SimpleNamespace(spec=SimpleNamespace(rdzv_handler=Handler())))
    assert agent._processes is None


def test_a_signal_that_came_when_the_ranks_had_just_ended_is_not_forgotten() -> None:
    """Their supervisor hears it no more; and the agent would wait for hosts that were asked to end, too."""
    agent = Agent.__new__(Agent)
    supervisor: Any = SimpleNamespace(interrupt=lambda signum: None)
    processes = WorkerProcesses.__new__(WorkerProcesses)
    processes.supervisor = supervisor
    agent._processes, agent._signals = processes, []
    agent._on_signal(signal.SIGTERM, None)
    with pytest.raises(SignalException, match="got signal: 15"):
        agent._rendezvous(SimpleNamespace(spec=None))


def test_who_has_stood_by_for_long_gets_the_time_of_all_to_meet() -> None:
    """Its first meeting may fail, as a second host is lost; the time counts from there."""
    agent: Any = Agent.__new__(Agent)
    agent._config = LaunchConfig(2, 2, 1, rdzv_configs={"join_timeout": 0.5})
    agent._settings = SimpleNamespace(health_check=None)
    agent._signals, agent._processes, agent._hosts = [], None, None
    met = iter([False, True])

    def come_together(_: object) -> bool:
        time.sleep(1.0)
        return next(met)

    agent._come_together = come_together
    agent._rendezvous(SimpleNamespace(spec=None))
    assert list(met) == []


def test_hosts_that_know_nothing_of_the_job_do_not_begin_without_all() -> None:
    """Others may go on with it elsewhere; who had a part in it knows, and the votes are counted then."""

    def check(*met: Host, dead: bool = False) -> None:
        agent: Any = SimpleNamespace(
            _config=SimpleNamespace(max_nodes=4),
            _settings=SimpleNamespace(silent_hosts_are_dead=dead),
            _has_told_why=False,
        )
        Agent._check_first_start(agent, met)

    new = [Host(f"10.0.0.{place}", 1, (place,), 0) for place in range(4)]
    check(*new)
    with pytest.raises(Apart, match="3 hosts have come, and the first start needs all 4"):
        check(*new[:3])
    check(*new[:3], dead=True)
    check(replace(new[0], pasts=(Past("start", 0, 4, 0, 0),)), *new[1:3])


@pytest.mark.parametrize(
    ("elsewhere", "sentence"),
    [
        (True, "the state of ranks 2, 3 after step 7, which this host's memory has, is in other hosts', too"),
        (False, "the state of ranks 2, 3 after step 7 is in this host's memory alone, and ends with it"),
    ],
)
def test_a_host_that_is_not_well_says_what_ends_with_its_memory(
    elsewhere: bool, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog()
    agent: Any = SimpleNamespace(
        _memory=object(),
        _hosts=SimpleNamespace(index=1),
        _last=SimpleNamespace(kept_in_memory=7, stays_without=lambda host: elsewhere and host == 1),
        _worker_group=SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in (2, 3)]),
        _log=log,
    )
    Agent._tell_what_goes(agent)
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert [event["event"] for event in log.events] == ([] if elsewhere else ["warning"])
    agent._last.kept_in_memory = None
    Agent._tell_what_goes(agent)
    assert capsys.readouterr().err == ""


def test_what_memory_has_goes_to_files_once_and_only_where_the_number_of_hosts_may_change(
    tmp_path: Path,
) -> None:
    folders.open_directory(tmp_path, "job")
    written: list[int] = []
    agent: Any = SimpleNamespace(
        _settings=SimpleNamespace(wait=4.0),
        _in_files=7,
        _memory=SimpleNamespace(write_saves=lambda of, ranks, step, *more: written.append(step)),
        _hosts=None,
        _last=SimpleNamespace(kept_in_memory=7, ranks_of_lost_hosts=(set(), set())),
        _worker_group=SimpleNamespace(workers=[]),
        _directory=SimpleNamespace(newest_saved=lambda: 3, path=tmp_path),
    )
    assert Agent._to_cut_anew(agent, tmp_path) == ToCutAnew(tmp_path, "job", 7)
    assert Agent._to_cut_anew(agent, None) is None
    Agent._write_what_memory_has(agent)
    assert written == []
    agent._last.kept_in_memory = 8
    Agent._write_what_memory_has(agent)
    assert written == [8]
    agent._settings.wait = None
    assert Agent._to_cut_anew(agent, tmp_path) is None


@pytest.mark.parametrize("what", ["host", "store"])
def test_at_the_jobs_end_nobody_waits_for_a_host_that_is_lost(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does, for 300 s."""
    waits, lost = threading.Event(), threading.Event()

    def barrier(agent: object) -> None:
        waits.set()
        never.wait()

    def guarded(call: Callable[[], None]) -> None:
        def look() -> None:
            if what == "store" and lost.is_set():
                raise StoreGone("it does not answer")

        limited_calls.watched(call, look)()

    never = threading.Event()
    monkeypatch.setattr(limited_calls, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(SimpleElasticAgent, "_exit_barrier", barrier)
    agent = Agent.__new__(Agent)
    hosts: Any = SimpleNamespace(lost=set(), name=str)
    lasting: Any = SimpleNamespace(guarded=guarded)
    agent._hosts, agent._lasting = hosts, lasting
    ending = threading.Thread(target=agent._exit_barrier, daemon=True)
    ending.start()
    assert waits.wait(60)
    assert ending.is_alive(), "as long as all are there they are waited for"
    lost.set()
    hosts.lost = {1} if what == "host" else set()
    ending.join(60)
    ended = not ending.is_alive()
    never.set()
    assert ended


def test_workers_that_can_not_be_supervised_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has no descriptor left: its workers would outlive it."""

    def supervisor(**_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("jitckpt.agent.worker_processes.Supervisor", supervisor)
    done: list[object] = []
    worker = SimpleNamespace(
        signal=done.append, reap=lambda: done.append("reaped"), close=lambda: done.append("closed")
    )
    processes: Any = WorkerProcesses.__new__(WorkerProcesses)
    nothing = ("_open_for_workers", "_copier_of_rings", "_proxies")
    vars(processes).update(dict.fromkeys(nothing, lambda: None), nprocs=1, _workers={})
    vars(processes).update(_prepare_worker=lambda _: None, _start_worker=lambda _: worker)
    vars(processes).update(dict.fromkeys(["_memory", "_control", "_barrier", "_relay", "_resting_place"]))
    processes._settings = SimpleNamespace(warm_start=False, save_deadline=60, stall_timeout=540, wait=None)
    processes._children = SimpleNamespace(end_all=lambda: done.append("all"))
    processes._log = EventLog()
    other = ("_restarts_left", "_mistakes_before", "_hosts", "_said_before", "_snapshot", "_protection")
    vars(processes).update(dict.fromkeys(other))
    with pytest.raises(OSError, match="Too many open files"):
        processes._start()
    assert done == [signal.SIGKILL, "reaped", "closed", "all"]
