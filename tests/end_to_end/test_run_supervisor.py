"""The supervisor over real processes that only play training ranks: saves, deadlines, second failures."""

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from descriptors import held_descriptors
from fork_server import python_path
from launcher import Launcher

from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import ControlSocket, Proxies
from jitckpt.agent.reports import Reports
from jitckpt.agent.supervisor import Supervisor
from jitckpt.decisions import recovery
from jitckpt.decisions.recovery import Outcome
from jitckpt.errors import SaveError
from jitckpt.events import Event, EventLog
from jitckpt.wire import protocol

PLENTY = 60.0  # a deadline that no test reaches


@dataclass
class Job:
    """A supervised job; what the supervisor reported, in order."""

    workers: list[Worker]
    directory: Path
    log: EventLog
    supervisor: Supervisor = field(init=False)
    registered: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    failed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    local_states: list[tuple[int, Path]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    disk: threading.Event = field(default_factory=threading.Event)  # answers

    def start(self, save_deadline: float, restarts_left: int, control: ControlSocket | None = None) -> None:
        reports = Reports(
            heard=self._heard,
            registered=self._registered,
            failed=self._failed,
            write_local_states=self._write_local_states,
        )
        self.supervisor = Supervisor(
            workers=self.workers,
            log=self.log,
            reports=reports,
            save_id=1,
            save_deadline=save_deadline,
            restarts_left=restarts_left,
            answer_within=10 * PLENTY,  # whoever can answers, however slow this machine may be
            proxies=None if control is None else self._proxies(control),
        )
        self.supervisor.start()

    def _proxies(self, control: ControlSocket) -> Proxies:
        sessions = {worker.rank: worker.pid for worker in self.workers}
        return Proxies(control, sessions, self.log, say=self.said.append, deadline=PLENTY)

    def _registered(self, worker: Worker, _message: protocol.Registered) -> None:
        """It must be heard of before the log has it: who acts on the log may rely on it."""
        if all(event["rank"] != worker.rank for event in self.events("registered")):
            self.registered.append(worker.rank)

    def _heard(self, _worker: Worker, message: protocol.WorkerMessage) -> None:
        if isinstance(message, protocol.Fault):
            self.faults.append(message.fault)

    def _failed(self, worker: Worker, exit_code: int, killed_by_agent: bool) -> None:
        self.failed[worker.rank] = (exit_code, killed_by_agent)

    def _write_local_states(
        self, ring: int, directory: Path, _steps: set[int], _by: str, is_host_missed: bool
    ) -> dict[int, int]:
        assert not is_host_missed
        rank = next(worker.rank for worker in self.workers if same_file(worker.ring_fd, ring))
        self.disk.wait()
        self.local_states.append((rank, directory))
        if rank == 2:
            raise SaveError("The disk is full.")
        return {7: 100}

    def wait_until_logged(self, name: str) -> None:
        end = time.monotonic() + PLENTY
        while not self.events(name):
            assert time.monotonic() < end
            time.sleep(0.01)

    def end_patience(self, *answered: int) -> None:
        """Once these ranks have answered, wait for no other answer; after a verdict, ask anew at once."""
        investigation = self.supervisor._hangs.investigation
        while (question := investigation._question) is None or not question.answers.keys() >= set(answered):
            time.sleep(0.01)
        while investigation._question is question:
            question.next_look = 0.0
            self.supervisor._requests.wake()
            time.sleep(0.01)

    def events(self, name: str) -> list[Event]:
        return [event for event in self.log.events if event["event"] == name]

    def close(self) -> None:
        self.supervisor.stop(signal.SIGTERM)
        for worker in self.workers:
            worker.close()


class Starter:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: list[Job] = []

    def __call__(
        self,
        *scripts: str,
        save_deadline: float = PLENTY,
        restarts_left: int = 1,
        control: ControlSocket | None = None,
        disk_blocks: bool = False,
    ) -> Job:
        """Start a rank for each script; it can use all that fake_worker has, and `here`, a directory."""
        workers = []
        for rank, script in enumerate(scripts):
            prologue = f"from fake_worker import *\nhere = {str(self.directory)!r}\n"
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(scripts)),
                "JITCKPT_RESTART": "0",
                "JITCKPT_CHECKPOINT_DIR": str(self.directory),
                "PYTHONPATH": python_path(),
            }
            if control is not None:
                environment["JITCKPT_PROXY_CONTROL"] = str(control.path)
            workers.append(
                Worker(
                    rank=rank,
                    command=[sys.executable, "-c", prologue + textwrap.dedent(script)],
                    environment=os.environ | environment,
                    ring_fd=os.memfd_create("ring"),
                    stdout=None,
                    stderr=None,
                )
            )
        job = Job(workers, self.directory, EventLog())
        if not disk_blocks:
            job.disk.set()
        job.start(save_deadline, restarts_left, control)
        self.jobs.append(job)
        return job


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends while it is read
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    files, others = held_descriptors(), children()  # what other files' jobs were forked from may be there
    starter = Starter(tmp_path)
    yield starter
    for job in starter.jobs:
        job.close()
    assert children() == others
    assert held_descriptors() <= files


DIES_WHEN_ALL_ARE_THERE = """
register()
wait_for(here + "/there")
die()
"""


def test_a_healthy_rank_saves_and_then_all_restart(start: Starter) -> None:
    job = start("register(); open(here + '/there', 'w'); save(7)", DIES_WHEN_ALL_ARE_THERE)
    assert job.supervisor.result() is Outcome.RESTART
    names = [event["event"] for event in job.log.events if event["event"] != "registered"]
    assert names == [
        "detected",
        "save_ordered",
        "save_begun",
        "save_ended",
        "saved",
        "ranks_ended",
        "local_state_written",
    ]
    assert job.events("detected")[0]["text"] == "rank 1 was killed by SIGKILL"
    assert job.events("save_ordered")[0]["ranks"] == (0,)
    assert job.events("saved")[0]["step"] == 7
    assert job.events("ranks_ended")[0]["kill"] in ((0,), (0, 1))  # rank 1 may not have ended altogether
    assert job.failed == {0: (-signal.SIGKILL, True), 1: (-signal.SIGKILL, False)}
    # The dead rank's own state is the one that no replica has.
    assert job.local_states == [(0, start.directory), (1, start.directory)]
    assert job.events("local_state_written")[0]["steps"] == {0: [7], 1: [7]}
    assert job.events("local_state_written")[0]["bytes"] == 200
    assert sorted(job.registered) == [0, 1]
    assert (start.directory / "events.jsonl").read_text().count("\n") == len(job.log.events)


def test_a_death_is_acted_on_before_the_process_has_ended(start: Starter) -> None:
    dies = "register(); wait_for(here + '/there'); die_slowly(3)"
    job = start("register(); open(here + '/there', 'w'); save(7)", dies)
    assert job.supervisor.result() is Outcome.RESTART
    assert [event["text"] for event in job.events("detected")] == ["rank 1 ended with exit status 3"]
    assert job.events("save_ordered")[0]["ranks"] == (0,)
    assert job.events("saved")[0]["step"] == 7
    assert job.events("ranks_ended")[0]["kill"] == (0, 1)
    assert job.failed == {0: (-signal.SIGKILL, True), 1: (-signal.SIGKILL, False)}


def test_without_a_restart_left_the_job_has_failed(start: Starter) -> None:
    job = start("register(); open(here + '/there', 'w'); save(7)", DIES_WHEN_ALL_ARE_THERE, restarts_left=0)
    assert job.supervisor.result() is Outcome.FAILED
    assert job.events("saved")[0]["step"] == 7


def test_a_rank_that_raised_is_found_before_its_end_and_not_waited_for(start: Starter) -> None:
    raises = "register(); wait_for(here + '/there'); say(protocol.Raised(RANK, 'ValueError: no')); hang()"
    job = start("register(); open(here + '/there', 'w'); save(7)", raises)
    assert job.supervisor.result() is Outcome.RESTART
    assert [event["text"] for event in job.events("detected")] == ["rank 1 ended with exit status 1"]
    assert job.events("saved")[0]["step"] == 7
    assert job.failed == {0: (-signal.SIGKILL, True), 1: (1, False)}


def test_a_file_system_that_blocks_stops_neither_a_restart_nor_a_signal(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LOCAL_STATE_SECONDS", 0.3)
    saves = "register(); open(here + '/there', 'w'); save(7)"
    job = start(saves, DIES_WHEN_ALL_ARE_THERE, save_deadline=1.0, disk_blocks=True)
    assert job.supervisor.result() is Outcome.RESTART
    (warning,) = job.events("warning")
    assert "could not be written: the file system of" in warning["text"]
    monkeypatch.setattr(recovery, "LOCAL_STATE_SECONDS", PLENTY)
    (start.directory / "there").unlink()
    second = start(saves, DIES_WHEN_ALL_ARE_THERE, disk_blocks=True)
    second.wait_until_logged("ranks_ended")
    for signum in (signal.SIGTERM, signal.SIGTERM):
        second.supervisor.interrupt(signum)
    assert second.supervisor.result() is Outcome.INTERRUPTED
    for one in (job, second):
        one.disk.set()
        writer = one.supervisor._local_states._writer
        assert writer is not None
        writer.join()
    assert not job.events("local_state_written")
    assert job.local_states == [(0, start.directory)], "nothing new is begun once nobody waits for it"


def test_ranks_that_end_well_need_no_help(start: Starter) -> None:
    job = start("register()", "register(); wait_for(here + '/late')")
    assert job.workers[0].has_ended(within=PLENTY)
    (start.directory / "late").touch()
    assert job.supervisor.result() is Outcome.SUCCEEDED
    assert job.failed == {}
    assert {event["event"] for event in job.log.events} == {"registered"}


def test_a_slow_save_is_waited_for_and_a_hung_one_only_until_the_deadline(start: Starter) -> None:
    job = start("register(); open(here + '/there', 'w'); hang()", DIES_WHEN_ALL_ARE_THERE, save_deadline=0.3)
    assert job.supervisor.result() is Outcome.RESTART
    (ordered,), (ended,) = job.events("save_ordered"), job.events("ranks_ended")
    assert ended["clock"] - ordered["clock"] >= 0.3
    assert job.events("not_saved")[0]["text"] == "rank 0 did not save in time, rank 1 has ended"


def test_the_whole_replica_that_comes_first_is_enough(start: Starter) -> None:
    """Rank 1 never ends its save; nobody waits for it, although the deadline is far."""
    job = start(
        "register(); wait_for(here + '/there'); save(7)",
        "register(); open(here + '/there', 'w'); await_order(); hang()",
        DIES_WHEN_ALL_ARE_THERE,
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("saved")[0]["step"] == 7
    assert set(job.events("ranks_ended")[0]["kill"]) == {0, 1}


def test_a_replica_that_is_a_step_ahead_is_waited_for(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "NEWER_STEP_GRACE", PLENTY)
    job = start(
        """
        register()
        order = await_order()
        say(protocol.SaveBegun(order.save_id, RANK, 8))
        wait_for(f"{here}/saved")
        say(protocol.SaveEnded(order.save_id, RANK, 0, 8, "step-8", 1000, 0.1))
        hang()
        """,
        """
        register()
        order = await_order()
        say(protocol.SaveEnded(order.save_id, RANK, 0, 7, "step-7", 1000, 0.1))
        open(f"{here}/saved", "w").close()
        hang()
        """,
        "register(); wait_until_logged('registered', 3); die()",
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("saved")[0]["step"] == 8


def test_every_shard_must_be_saved(start: Starter) -> None:
    job = start(
        "register(0, 2); open(here + '/0', 'w'); save(7, shard=0)",
        """
        register(1, 2)
        wait_for(here + '/0')
        open(here + '/1', 'w')
        order = await_order()
        wait_until_logged('save_ended', 1)
        time.sleep(0.1)  # a wrong agent would have ended this rank by now
        say(protocol.SaveEnded(order.save_id, RANK, 1, 7, 'path', 1000, 0.1))
        hang()
        """,
        "register(0, 2); wait_for(here + '/1'); wait_until_logged('registered', 4); die()",
        "register(1, 2); hang()",
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert [event["rank"] for event in job.events("save_ended")] == [0, 1]
    assert job.events("saved")[0]["step"] == 7


def test_a_second_failure_during_the_save_ends_the_waiting(start: Starter) -> None:
    job = start(
        "register(); open(here + '/there', 'w'); await_order(); die(signal.SIGSEGV)", DIES_WHEN_ALL_ARE_THERE
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("not_saved")[0]["text"] == "rank 0 has ended, rank 1 has ended"
    assert [event["first"] for event in job.events("detected")] == [True, False]
    assert job.failed[0] == (-signal.SIGSEGV, False)


def test_another_replica_serves_if_one_cannot_save(start: Starter) -> None:
    job = start(
        "register(); open(here + '/0', 'w'); fail_to_save('the disk is full')",
        """
        register()
        wait_for(here + '/0')
        open(here + '/there', 'w')
        wait_until_logged('save_failed', 1)
        save(7)
        """,
        DIES_WHEN_ALL_ARE_THERE,
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("save_failed")[0]["reason"] == "the disk is full"
    assert job.events("save_failed")[0]["traceback"] == "Traceback ..."
    assert job.events("saved")[0]["step"] == 7
    assert "rank 2's own state (random numbers, buffers ...) is lost: The disk is full." in [
        event["text"] for event in job.events("warning")
    ]


def test_a_stopped_rank_is_named_and_killed(start: Starter) -> None:
    """The others' watchdog finds it; it can't answer, and SIGTERM would not wake it."""
    job = start(
        """
        register()
        wait_for(here + '/pid')
        pid = open(here + '/pid').read()
        while ' (stopped)' not in open(f'/proc/{pid}/status').read():
            time.sleep(0.005)
        wait_until_logged('registered', 2)  # whoever has not is late, not silent
        report_hang(2.0)
        save(7)
        """,
        """
        register()
        open(here + '/new', 'w').write(str(os.getpid()))
        os.rename(here + '/new', here + '/pid')
        die(signal.SIGSTOP)
        """,
    )
    job.end_patience(0)
    assert job.supervisor.result() is Outcome.RESTART
    (detected,) = job.events("detected")
    assert detected["cause"] == "hang"
    assert detected["text"] == (
        "rank 0 has waited 2.0 s in ncclAllReduce number 7 (4.1 kB) of 2 ranks, where rank 1 has not "
        "arrived; rank 1 does not answer, rank 1 is stopped"
    )
    assert job.events("save_ordered")[0]["ranks"] == (0, 1)
    assert job.events("saved")[0]["step"] == 7
    assert job.failed == {0: (-signal.SIGKILL, True), 1: (-signal.SIGKILL, True)}


STOPS_BEFORE_ITS_SAVE = "register(); wait_until_logged('registered', 2); die(signal.SIGSTOP); save(7)"


def test_a_stopped_rank_that_alone_can_save_is_named_and_waited_for(start: Starter) -> None:
    """Rank 0 has been killed; somebody lets rank 1 go on."""
    job = start("register(); wait_until_logged('registered', 2); die()", STOPS_BEFORE_ITS_SAVE)
    job.wait_until_logged("warning")
    pid = job.workers[1].pid
    assert [event["text"] for event in job.events("warning")] == [
        "rank 1 is stopped by a signal, and no other rank can save what it has: it is waited for until the "
        f"{PLENTY:g} s are over. To let it go on: kill -CONT {pid}"
    ]
    os.kill(pid, signal.SIGCONT)
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("saved")[0]["step"] == 7


def test_a_stopped_rank_that_alone_can_save_is_waited_for_until_the_deadline(start: Starter) -> None:
    job = start(
        "register(); wait_until_logged('registered', 2); die()", STOPS_BEFORE_ITS_SAVE, save_deadline=0.5
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("save_ordered")[0]["ranks"] == (1,)
    assert job.events("saved") == []
    assert job.failed == {0: (-signal.SIGKILL, False), 1: (-signal.SIGKILL, True)}


def test_a_straggler_is_waited_for(start: Starter) -> None:
    """Rank 1 lives and has not arrived; then it does."""
    job = start(
        """
        register()
        wait_until_logged('registered', 2)
        report_hang()
        answer_one()
        wait_for(here + '/arrived')
        place['seconds'] = 0
        answer_one()
        """,
        """
        register()
        answer_one()
        place['sequence'] = 7
        open(here + '/arrived', 'w')
        answer_one()
        """,
    )
    job.end_patience(0, 1)
    assert job.supervisor.result() is Outcome.SUCCEEDED
    assert job.events("straggler")[0]["ranks"] == (1,)
    assert len(job.events("hang_over")) == 1
    assert job.events("detected") == job.events("save_ordered") == []


def test_a_straggler_is_not_waited_for_for_ever(start: Starter) -> None:
    job = start(
        "register(); wait_until_logged('registered', 2); report_hang(seconds=1000.0); save(7)",
        "register(); answer_one(); hang()",
    )
    assert job.supervisor.result() is Outcome.RESTART
    (detected,) = job.events("detected")
    assert "where rank 1 has not arrived" in detected["text"]
    (report,) = job.events("hang_report")
    assert "rank 0 has waited 1000.0 s" in Path(report["path"]).read_text()


def test_a_hang_after_another_rank_has_ended_well(start: Starter) -> None:
    job = start("register(); wait_for(here + '/late'); report_hang(); save(7)", "register()")
    assert job.workers[1].has_ended(within=PLENTY)
    while Path(f"/proc/{job.workers[1].pid}").exists():
        pass
    (start.directory / "late").touch()
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("detected")[0]["text"] == (
        "rank 0 has waited 2.0 s in ncclAllReduce number 7 (4.1 kB) of 2 ranks, where all have arrived"
    )
    assert job.events("saved")[0]["step"] == 7


def test_a_rank_that_exits_with_an_error_has_failed(start: Starter) -> None:
    job = start(
        "register(); open(here + '/there', 'w'); save(3)",
        "register(); wait_for(here + '/there'); sys.exit(3)".replace("sys", "__import__('sys')"),
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("detected")[0]["text"] == "rank 1 ended with exit status 3"
    assert job.failed[1] == (3, False)


def test_ranks_that_never_registered_get_sigterm_as_under_torchrun(start: Starter) -> None:
    job = start(
        """
        signal.signal(signal.SIGTERM, lambda *_: (open(here + '/told', 'w'), os._exit(0)))
        open(here + '/there', 'w')
        hang()
        """,
        "wait_for(here + '/there'); die()",
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert (start.directory / "told").exists()
    assert job.events("save_ordered") == []
    assert job.failed == {1: (-signal.SIGKILL, False)}


def test_what_a_worker_started_ends_with_it(start: Starter) -> None:
    job = start(
        """
        import subprocess
        child = subprocess.Popen(['sleep', '1000'])
        open(here + '/new', 'w').write(str(child.pid))
        os.rename(here + '/new', here + '/pid')
        """
    )
    assert job.supervisor.result() is Outcome.SUCCEEDED
    pid = int((start.directory / "pid").read_text())
    while is_running(pid):  # it was sent SIGKILL, and may take its time
        pass


def test_asked_to_end_the_job_saves_first(start: Starter) -> None:
    """Also where the rank has registered only a moment before."""
    job = start("register(); open(here + '/there', 'w'); save(9)")
    while not (start.directory / "there").exists():
        pass
    job.supervisor.interrupt(signal.SIGTERM)
    assert job.supervisor.result() is Outcome.INTERRUPTED
    assert job.events("detected")[0]["text"] == "the agent was sent SIGTERM"
    assert job.events("saved")[0]["step"] == 9


def test_asked_twice_to_end_nothing_is_waited_for(start: Starter) -> None:
    # The first signal is passed on to them, and would end them before the second.
    waits = "signal.signal(signal.SIGINT, signal.SIG_IGN); open(f'{here}/there-{RANK}', 'w'); hang()"
    job = start(waits, waits)
    while not all((start.directory / f"there-{rank}").exists() for rank in (0, 1)):
        pass
    job.supervisor.interrupt(signal.SIGINT)
    job.supervisor.interrupt(signal.SIGINT)
    assert job.supervisor.result() is Outcome.INTERRUPTED
    assert {exit_code for exit_code, _ in job.failed.values()} == {-signal.SIGKILL}


def test_nonsense_is_a_warning_and_a_fault_is_reported(start: Starter) -> None:
    job = start(
        """
        AGENT.send(b'{"type":"nonsense"}')
        AGENT.send(b'x' * 65536)
        say(protocol.Fault(RANK, 'rank=0 step=1', 1, 'forward'))
        say(protocol.Warning(RANK, 'mind the gap'))
        """
    )
    assert job.supervisor.result() is Outcome.SUCCEEDED
    warnings = [event["text"] for event in job.events("warning")]
    assert "unknown type 'nonsense'" in warnings[0]
    assert "not JSON" in warnings[1]
    assert warnings[2] == "mind the gap"
    assert job.faults == ["rank=0 step=1"]


def test_a_save_that_answers_another_order_does_not_count(start: Starter) -> None:
    job = start(
        """
        register()
        open(here + '/there', 'w')
        order = await_order()
        say(protocol.SaveEnded(order.save_id + 1, RANK, 0, 7, 'path', 1000, 0.1))
        hang()
        """,
        DIES_WHEN_ALL_ARE_THERE,
        save_deadline=0.3,
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("saved") == []


def test_a_rank_whose_training_has_finished_is_not_asked_to_save(start: Starter) -> None:
    job = start(
        "register(); say(protocol.Finished(RANK, 9)); open(here + '/there', 'w'); hang()",
        DIES_WHEN_ALL_ARE_THERE,
    )
    assert job.supervisor.result() is Outcome.RESTART
    assert job.events("save_ordered") == []
    assert "rank 0 had finished its training" in job.events("not_saved")[0]["text"]


def test_what_ends_after_the_training_restarts_nothing(start: Starter) -> None:
    """As where the interpreter or a library fails while the process ends."""
    job = start(
        "register(); say(protocol.Finished(RANK, 9, at_exit=True))",
        """
        register()
        say(protocol.Finished(RANK, 9, at_exit=True))
        wait_until_logged('finished', 2)
        die(signal.SIGSEGV)
        """,
        restarts_left=3,
    )
    assert job.supervisor.result() is Outcome.FAILED
    assert job.events("detected")[0]["text"] == "rank 1 was killed by SIGSEGV"
    assert job.events("not_saved") == []


def test_a_rank_that_closes_its_socket_can_end_well(start: Starter) -> None:
    job = start("register(); AGENT.close(); wait_for(here + '/late')")
    while not job.events("registered"):
        pass
    (start.directory / "late").touch()
    assert job.supervisor.result() is Outcome.SUCCEEDED


def test_a_failure_of_the_supervisor_itself_is_raised_and_leaves_no_worker(start: Starter) -> None:
    job = start("ignore_sigterm(); say(protocol.Fault(RANK, 'x', 1, 'forward')); hang()")
    job.supervisor._hangs.look = _broken  # type: ignore[method-assign]
    job.supervisor.interrupt(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="control thread failed"):
        job.supervisor.result()
    assert job.workers[0].has_ended(within=0)


def _broken() -> None:
    raise ZeroDivisionError


def test_a_message_of_which_something_unforeseen_comes_is_noted_and_passed_over(start: Starter) -> None:
    job = start("say(protocol.Fault(RANK, 'x', 1, 'forward')); wait_for(here + '/go')")
    job.faults = None  # type: ignore[assignment]
    while not job.events("warning"):
        time.sleep(0.01)
    (warning,) = job.events("warning")
    assert "rank 0 says what makes no sense: AttributeError" in warning["text"]
    (job.directory / "go").touch()
    assert job.supervisor.result() is Outcome.SUCCEEDED


PROXY = """import socket
from jitckpt.wire import proxy_messages
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.connect(os.environ["JITCKPT_PROXY_CONTROL"])

def tell(message):
    control.send(proxy_messages.encode(message))

def hear(kind):
    heard = proxy_messages.decode(control.recv(proxy_messages.MAX_BYTES))
    assert type(heard) is kind, heard
    return heard

def recover():
    now = hear(proxy_messages.Stop).recovery
    tell(proxy_messages.Held(now))
    hear(proxy_messages.Rest)
    tell(proxy_messages.Stopped(now, 6, 7, 3, 0, proxy_messages.LOST, 7, 7, 7, 90, 0, "", ()))
    hear(proxy_messages.Restart)
    tell(proxy_messages.Ids(now, (), 0, 0, 1))
    assert hear(proxy_messages.Replay).state == 7
    tell(proxy_messages.Done(now, 0, 0, 0, 0, 0, 0))

tell(proxy_messages.Hello((0, 0), os.getpid(), RANK, ""))
""".replace("\n", "\n        ")


def test_device_proxies_recover_until_a_worker_dies(
    start: Starter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = ControlSocket()
    job = start(
        f"""
        {PROXY}
        recover()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        reason = hear(proxy_messages.GiveUp).reason
        open(here + "/told", "w").write(reason)
        signal.sigtimedwait([signal.SIGTERM], 60)  # the supervisor ends who lives
        exit(3)
        """,
        f"""
        {PROXY}
        while os.path.exists(os.environ["JITCKPT_PROXY_CONTROL"]):
            time.sleep(0.01)  # until both are there
        tell(proxy_messages.Alarm((0, 0), 0, "its server was ended by Killed"))
        recover()
        wait_for(here + "/recovered")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        control=control,
    )
    Launcher(tmp_path).wait_until(lambda: job.events("recovered") != [])
    (tmp_path / "recovered").touch()
    assert job.supervisor.result() is Outcome.RESTART
    assert [event["rank"] for event in job.events("device_alarm")] == [1]
    assert job.events("recovered")[0]["state"] == 7
    why = "A transparent recovery is impossible: rank 1 is gone: its worker process was killed by SIGKILL."
    assert (tmp_path / "told").read_text() == why
    assert job.said[-1] == why
    told = capsys.readouterr().err
    assert "no rank has come through jitckpt.init yet, so there is no state to save; behind it" in told
    assert "the job goes on from a save" in told
    assert not control.path.parent.exists()
