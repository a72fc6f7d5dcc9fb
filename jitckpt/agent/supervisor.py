"""The agent's control thread: hears of what happens to the workers, does what recovery.decide says."""

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jitckpt.agent.investigation import DRIVER_SECONDS, STACK_SECONDS, Investigation, stacks_of
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.protection import MemoryProtection
from jitckpt.agent.proxies.control import Proxies
from jitckpt.console import say
from jitckpt.decisions.memory_state import Health
from jitckpt.decisions.recovery import (
    STOPPED_GRACE,
    Close,
    EndRanks,
    KnownJob,
    LetEnd,
    OrderSave,
    Outcome,
    Rank,
    Wait,
    WriteLocalState,
    can_take_in,
    decide,
    incurable,
    is_last_of_its_shard,
    mistakes,
    starts_again,
    training_is_over,
    whole_steps,
)
from jitckpt.errors import JitckptError
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, HostLost, Hosts, Unclear
from jitckpt.ring import format as ring_format
from jitckpt.ring import local_state, wishes
from jitckpt.system.kernel_log import MOST_LINES, xid_lines
from jitckpt.system.stacks import read_stacks
from jitckpt.wire import agents, protocol
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.protocol import WorkerMessage

STATUS_OF_AN_EXCEPTION = 1  # of a Python that an exception has ended
MOST_NONSENSE = 100  # messages that are noted
MOST_TEXT = 2000  # characters of a failure's description
MOST_OF_A_LINE = 500  # characters of the kernel's log
SIGNALS_HEARD_WITHIN = 0.2  # seconds
SAME_REQUEST_SECONDS = 1.0  # wrappers (uv run, srun) pass on a signal that the agent gets by itself, too
STOPPED_LOOK = 0.5  # seconds between two looks whether a rank that is to save is stopped


@dataclass(frozen=True)
class Reports:
    """Whom the supervisor tells, on its own thread, what others have to act on."""

    heard: Callable[[Worker, WorkerMessage], None]  # every message, once the log has it
    registered: Callable[[Worker, protocol.Registered], None]  # before that
    failed: Callable[[Worker, int, bool], None]  # with the exit code, and whether the agent killed it
    # On another thread: of a rank, from its ring, into a directory, for these steps and all saved there; the
    # bytes by step. Then who writes, "" for the rank's own host, and whether a host is missed.
    write_local_states: Callable[[int, Path, set[int], str, bool], dict[int, int]]
    blamed: Callable[[Worker], None] = lambda worker: None  # it has failed by itself, and before all others
    # The other hosts are about to be told that a rank dies or has ended: send who keeps a copy of its ring
    # the rest.
    last_copy: Callable[[], None] = lambda: None


class Supervisor(threading.Thread):
    """Watches over one start of the workers until the last of them has ended."""

    def __init__(
        self,
        *,
        workers: Sequence[Worker],
        log: EventLog,
        reports: Reports,
        save_id: int,
        save_deadline: float,
        restarts_left: int,
        stall_timeout: float = 540.0,
        answer_within: float = 3.0,
        hosts: Hosts | None = None,
        proxies: Proxies | None = None,
        mistakes_before: frozenset[str] = frozenset(),
        protection: MemoryProtection | None = None,
        said_before: Sequence[Arrived | Unclear | HostLost] = (),
        elastic: bool = False,
        snapshot: Callable[[], int | None] = lambda: None,
    ) -> None:
        """stall_timeout: seconds that a live rank may keep the others waiting in a collective.

        answer_within: seconds in which every live rank says where it is. hosts: where there are several.
        proxies: of the workers in transparent mode. protection: by the memory tier.
        mistakes_before: those of the start before this one. said_before: by others, to the host in whose
        place this one comes. elastic: the job may go on with fewer hosts, and takes in others. snapshot: the
        step of the one to which the ranks go back if one fails; None: there is none.
        """
        super().__init__(name="jitckpt-supervisor", daemon=True)
        self._workers = {worker.rank: worker for worker in workers}
        self._log = log
        self._reports = reports
        self._save_id = save_id
        self._hosts, self._proxies, self._protection = hosts, proxies, protection
        self._lost_hosts: set[int] = set()
        self.losses: dict[int, str] = {}  # hosts that are lost, and why
        self.leaving: set[int] = set()  # hosts whose agents were asked to end
        numbers = set(self._workers) if hosts is None else {rank for host in hosts.all for rank in host.ranks}
        ranks = tuple(Rank(rank, own=rank in self._workers) for rank in sorted(numbers))
        self._job = KnownJob(
            ranks, time.monotonic(), save_deadline, restarts_left, mistakes_before=mistakes_before
        )
        self._registrations: dict[int, protocol.Registered] = {}
        self._local_states = self._states_of_ranks()
        self._hangs: dict[int, protocol.Hang] = {}  # that are transparent mode's affair first
        self._trouble: str | None = None
        self._newest_begun = 0
        self._nonsense = 0  # messages that could not be acted on
        self._investigation = Investigation(
            self._workers,
            self._order,
            log,
            stall_timeout,
            answer_within,
            ask_for_stacks=self._ask_for_stacks,
        )
        self._said_before, self._elastic, self._snapshot = said_before, elastic, snapshot
        self._wants_in = ""  # who waits to be taken in, in words
        self.interrupts: list[int] = []
        self._told_stopped: set[int] = set()  # ranks
        self._patient_until = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def _states_of_ranks(self) -> LocalStates:
        return LocalStates(
            self._workers,
            self._registrations,
            self._hosts,
            self._lost_hosts,
            self._leads,
            self._log,
            self._reports.write_local_states,
            wake=lambda: os.eventfd_write(self._wake, 1),
        )

    def interrupt(self, signum: int) -> None:
        """Take note of a signal that asks the agent to end; the second time nothing is waited for.

        May be called by a signal handler.
        """
        now = time.monotonic()
        if self.interrupts and now < self._patient_until:
            return
        self._patient_until = now + SAME_REQUEST_SECONDS
        self._ask_to_end(signum)

    def _ask_to_end(self, *signals: int) -> None:
        self.interrupts += signals
        if not self._done.is_set():
            os.eventfd_write(self._wake, 1)

    def take_in(self, who: str) -> None:
        """Have all ranks saved, to start again with the hosts that wait: `who`, a clause. From any thread."""
        self._wants_in = who
        if not self._done.is_set():
            os.eventfd_write(self._wake, 1)

    def result(self) -> Outcome:
        """Wait until all workers have ended; return how. Raises RuntimeError if this thread itself failed."""
        # In turns: between two, handlers run of signals that came just before a wait, or to another thread.
        while not self._done.wait(SIGNALS_HEARD_WITHIN):
            pass
        if self._outcome is None:
            raise RuntimeError("jitckpt's control thread failed; it killed the workers.") from self._error
        return self._outcome

    def run(self) -> None:
        """Supervise; whatever happens, no worker is left."""
        try:
            self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
            if self._hosts is not None:
                self._selector.register(self._hosts.wake, selectors.EVENT_READ, self._hear_hosts)
            if self._proxies is not None:
                self._proxies.watch(self._selector)
            for worker in self._workers.values():
                self._selector.register(worker.socket, selectors.EVENT_READ, _bound(self._receive, worker))
                self._selector.register(worker.pidfd, selectors.EVENT_READ, _bound(self._ended, worker))
            for arrived in self._said_before:
                self._take(arrived)
            self._outcome = self._supervise()
        except BaseException as error:
            self._error = error
            self._kill_own()
        finally:
            self._selector.close()
            self._local_states.give_up()  # of waiting for it
            if self._proxies is not None:
                self._proxies.close()
            self._done.set()

    def _kill_own(self) -> None:
        for rank in self._job.ranks:
            if rank.alive and rank.own:
                self._workers[rank.rank].signal(signal.SIGKILL)
                self._workers[rank.rank].reap()

    def stop(self, signum: int) -> None:
        """End what still runs, at once, and free what the thread needed. To be called by the main thread."""
        if not self._done.is_set():
            self._ask_to_end(signum, signum)  # as asked twice: nothing is waited for
        self.join()
        self._local_states.close()
        os.close(self._wake)

    def _supervise(self) -> Outcome:
        while True:
            interrupts = self._hear_all()
            if self._look_at_proxies():
                return Outcome.SUCCEEDED  # for this host: others, or another launcher, see to its ranks
            if interrupts and not self._job.interrupted:
                agent = (
                    "the agent" if self._hosts is None else f"{self._hosts.name(self._hosts.index)}'s agent"
                )
                self._tell_alarm("signal", f"{agent} was sent {_signal_name(self.interrupts[0])}")
            self._job = replace(
                self._job,
                now=time.monotonic(),
                interrupted=interrupts > 0,
                impatient=interrupts > 1,
                in_memory=self._in_memory(),
                goes_back=self._goes_back(),
            )
            if self._local_states.are_written():
                self._job = replace(self._job, local_state_written=True)
            self._look_who_waits()
            self._look_into_hangs()
            absent = tuple(
                rank.rank for rank in self._job.ranks if rank.alive and (not rank.registered or rank.finished)
            )
            if not self._job.alarmed and (found := self._investigation.verdict(self._askable(), absent)):
                blamed = self._investigation.blamed
                # Before ranks end.
                self._investigation.begin_report(self._registrations, self._local_states.directory())
                self._tell_alarm("hang", found, blamed)
            self._investigation.finish_report()
            next_look = self._look_for_stopped()
            match decide(self._job):
                case Wait(until):
                    looks = [self._investigation.report_due, next_look]
                    looks += [] if self._job.alarmed else [self._investigation.next_look]
                    looks += [] if self._proxies is None else [self._proxies.next_look]
                    first = min((one for one in (until, *looks) if one is not None), default=None)
                    self._listen(None if first is None else max(0.0, first - time.monotonic()))
                case LetEnd(ranks):
                    self._let_end(ranks)
                case OrderSave(ranks):
                    self._order_save(ranks)
                    self._investigation.read_stacks()
                case EndRanks(kill, terminate):
                    self._end(kill, terminate)
                case WriteLocalState():
                    self._begin_local_states()
                case Close(outcome):
                    self._local_states.leave(is_impatient=self._job.impatient)
                    self._investigation.finish_report(at_once=True)
                    if outcome is Outcome.FAILED and (reason := incurable(self._job)):
                        self._log.write("incurable", text=reason)
                        self._say(f"the job ends here, with no restart: {reason}.")
                    return outcome

    def _look_who_waits(self) -> None:
        if self._wants_in and not self._job.takes_in and self._leads():
            assert self._hosts is not None
            self._hosts.broadcast(agents.TakesIn(self._wants_in))
            self._job = replace(self._job, takes_in=True, is_free=True)
        if can_take_in(self._job):
            self._alarm("hosts", self._wants_in)

    def _look_at_proxies(self) -> bool:
        """Return whether this host's ranks go on on another one, or are in files."""
        if self._proxies is None:
            return False
        self._proxies.look()
        if self._proxies.suspended:
            self._kill_own()
            return True
        if any(self._rank(rank).finished for rank in self._proxies.stragglers):
            self._job = replace(self._job, suspected=True)
        return self._proxies.moved

    def _hear_all(self) -> int:
        """Take in all that was said: it counts in the decision about a failure. Return the interrupts."""
        while True:
            interrupts = len(self.interrupts)
            self._listen(0)
            if len(self.interrupts) == interrupts:
                return interrupts  # else one came in between, and what wakes this thread for it was heard

    def _listen(self, timeout: float | None) -> None:
        """Wait for something to happen; take in all that has happened by then."""
        while ready := self._selector.select(timeout):
            timeout = 0
            for key, _ in ready:
                if self._proxies is not None and self._proxies.moved:
                    return  # what has ended here goes on elsewhere
                if key.fd in self._selector.get_map():  # else another one of these has removed it
                    key.data()

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _rank(self, rank: int) -> Rank:
        found = next((known for known in self._job.ranks if known.rank == rank), None)
        if found is None:
            raise KeyError(f"rank {rank}")
        return found

    def _look_for_stopped(self) -> float | None:
        """While saves are waited for: note who is stopped and so can't save. Returns when to look again."""
        if self._job.save_ordered_at is None or self._job.ending_since is not None:
            return None
        for rank in self._job.ranks:
            if rank.own and rank.can_save:
                stopped = self._workers[rank.rank].is_stopped()
                self._change(
                    rank.rank, stopped_since=(rank.stopped_since or self._job.now) if stopped else None
                )
                self._tell_of_stopped(self._rank(rank.rank))
        return self._job.now + STOPPED_LOOK

    def _tell_of_stopped(self, rank: Rank) -> None:
        """Say for whom all wait; a moment may pass before, in which somebody looks at the rank."""
        stands = rank.stopped_since is not None and self._job.now >= rank.stopped_since + STOPPED_GRACE
        if not stands or rank.rank in self._told_stopped or not is_last_of_its_shard(self._job, rank):
            return
        self._told_stopped.add(rank.rank)
        text = (
            f"rank {rank.rank} is stopped by a signal, and no other rank can save what it has: it is waited "
            f"for until the {self._job.save_deadline:g} s are over. To let it go on: kill -CONT "
            f"{self._workers[rank.rank].pid}"
        )
        self._log.write("warning", rank=rank.rank, text=text)
        say(f"{text}.")

    def _change(self, rank: int, **facts: Any) -> None:
        ranks = (replace(known, **facts) if known.rank == rank else known for known in self._job.ranks)
        self._job = replace(self._job, ranks=tuple(ranks))

    # What is heard.

    def _receive(self, worker: Worker) -> None:
        for message in worker.receive():
            if message is None:
                self._selector.unregister(worker.socket)
                # A process that ends closes its socket a moment before its death can be seen.
                if self._rank(worker.rank).reachable and worker.has_ended(within=0.5):
                    self._reap(worker)
                else:
                    self._change(worker.rank, reachable=False)
            elif isinstance(message, ProtocolError):
                self._note_nonsense(f"rank {worker.rank}", message)
            else:
                try:
                    self._act_on(worker, message)
                except Exception as error:
                    self._note_nonsense(f"rank {worker.rank}", error)

    def _act_on(self, worker: Worker, message: WorkerMessage) -> None:
        self._forward(worker.rank, message)
        if isinstance(message, protocol.Registered):
            self._reports.registered(worker, message)
        self._hear(worker.rank, message)
        self._reports.heard(worker, message)

    def _note_nonsense(self, who: str, error: Exception) -> None:
        """Take note of a message that can't be acted on, whatever came of it: it must not end this thread.

        For without it all ranks would be killed. There is no end of such messages if there is one.
        """
        self._nonsense += 1
        if self._nonsense <= MOST_NONSENSE:
            more = " No more of that is noted." if self._nonsense == MOST_NONSENSE else ""
            what = str(error) if isinstance(error, ProtocolError) else f"{error!r:.300}"
            self._log.write("warning", text=f"{who} says what makes no sense: {what}{more}")

    def _forward(self, rank: int, message: WorkerMessage) -> None:
        """Let the other hosts hear it, too; what only one host acts on goes to that one."""
        if self._hosts is None or isinstance(message, protocol.Loaded):
            return
        said = agents.Said(rank, protocol.encode(message).decode())
        if not isinstance(message, protocol.Progress | protocol.Group):
            self._hosts.broadcast(said)
        elif not self._leads():
            self._hosts.send(self._leader(), said)

    def _hear(self, rank: int, message: WorkerMessage) -> None:
        # Those are long, and of use for a moment or to the agent alone.
        if not isinstance(message, protocol.Loaded | protocol.Progress | protocol.Group):
            fields = asdict(message)
            del fields["time"]
            self._log.write(message.type, **(fields | {"rank": rank}))
        match message:
            case protocol.Registered():
                self._register(rank, message)
            case protocol.AtEnd() | protocol.Finished():
                self._hear_of_end(rank, message)
            case protocol.TorchLoaded() | protocol.Failing() | protocol.WorkRefused() | protocol.Raised():
                self._hear_how_it_ends(rank, message)
            case protocol.Hang():
                self._hear_of_hang(rank, message)
            case protocol.Group():
                self._investigation.name_group(message)
            case protocol.Progress():
                self._investigation.hear(rank, message)
            case protocol.NcclError():
                self._alarm(
                    "nccl_error", f"{message.operation} of rank {rank} failed: {message.text}", [rank]
                )
            case protocol.SaveWaits() | protocol.SaveBegun() | protocol.SaveEnded() | protocol.SaveFailed():
                self._hear_of_save(rank, message)
            case protocol.Warning():
                self._say(f"rank {rank}: {message.text}")

    def _hear_of_save(self, rank: int, message: WorkerMessage) -> None:
        match message:
            case protocol.SaveWaits(save_id=self._save_id):
                self._change(rank, goes_on=True)
            case protocol.SaveBegun(save_id=self._save_id):
                self._change(rank, saving_step=message.step)
            case protocol.SaveEnded(save_id=self._save_id):
                self._saved(rank, message.step)
            case protocol.SaveFailed(save_id=self._save_id):
                self._change(rank, save="failed")
                self._say(f"rank {rank} could not save: {message.reason}")

    def _hear_of_end(self, rank: int, message: protocol.AtEnd | protocol.Finished) -> None:
        if isinstance(message, protocol.AtEnd):
            self._change(rank, finished=True)
        else:
            self._change(rank, reachable=False, finished=message.at_exit)

    def _hear_how_it_ends(self, rank: int, message: WorkerMessage) -> None:
        match message:
            case protocol.TorchLoaded():
                self._change(rank, torch_loaded=True)
            case protocol.Failing():
                self._change(rank, failing=message.mistake)
            case protocol.WorkRefused():
                if all(known.refused is None for known in self._job.ranks):  # each rank may say the same
                    self._say(f"rank {rank} can't go on: {message.reason}")
                self._change(rank, refused=message.reason)
            case protocol.Raised():
                self._change(rank, raised=True)
                self._died(rank, STATUS_OF_AN_EXCEPTION)

    def _hear_of_hang(self, rank: int, message: protocol.Hang) -> None:
        """Look into it, unless it is still transparent mode's affair."""
        if self._recovers():
            self._hangs[rank] = message
            return
        self._job = replace(self._job, suspected=True)
        if self._leads():
            self._investigation.begin(rank, message, self._askable())

    def _look_into_hangs(self) -> None:
        """Look into those that transparent mode was to see to, once it has given up."""
        while self._hangs and not self._recovers():
            self._hear_of_hang(*self._hangs.popitem())

    def _recovers(self) -> bool:
        return self._proxies is not None and self._proxies.recovers

    def _askable(self) -> tuple[int, ...]:
        ranks = self._job.ranks
        return tuple(
            rank.rank
            for rank in ranks
            if rank.alive and rank.registered and rank.reachable and not rank.raised and not rank.finished
        )

    def _register(self, rank: int, message: protocol.Registered) -> None:
        worker = self._workers.get(rank)
        if worker is not None and worker.pid == message.pid and rank not in self._registrations:
            self._watch_lifeline(worker)
        self._registrations[rank] = message
        self._change(rank, registered=True, reachable=True, shard=message.shard, shards=message.shards)
        self._log.open(Path(message.checkpoint_dir))
        if self._proxies is not None and all(known.registered for known in self._job.ranks):
            self._proxies.can_restart()

    def _saved(self, rank: int, step: int) -> None:
        self._change(rank, save="ended", saved_step=step)
        if self._job.whole_at is None and whole_steps(self._job.ranks):
            self._job = replace(self._job, whole_at=time.monotonic())
            if self._job.ending_since is not None:  # without waiting for it, and said so
                self._tell_what_is_saved()

    def _alarm(self, cause: str, text: str, ranks: Sequence[int] = ()) -> None:
        self._detected(cause, text, ranks)
        self._job = replace(self._job, alarmed=True)

    def _tell_alarm(self, cause: str, text: str, blamed: Sequence[int] = ()) -> None:
        """Raise an alarm on all hosts about what only this one knows; blamed: the ranks that caused it."""
        if self._hosts is not None:
            self._hosts.broadcast(agents.HostAlarm(cause, text, list(blamed)))
        self._alarm(cause, text, blamed)
        self._blame(blamed)

    def _watch_lifeline(self, worker: Worker) -> None:
        worker.lifeline.watch()
        released = worker.lifeline.released
        self._selector.register(released, selectors.EVENT_READ, _bound(self._let_go, worker))

    def _let_go(self, worker: Worker) -> None:
        """The worker's end may have begun; a failure is acted on before it has ended."""
        self._selector.unregister(worker.lifeline.released)
        if worker.socket.fileno() in self._selector.get_map():
            self._receive(worker)  # what it said before
        rank = self._rank(worker.rank)
        if not rank.alive or rank.raised or rank.told != "nothing":
            return
        if exit_code := worker.dies_with():
            if self._hosts is not None:
                self._reports.last_copy()
                self._hosts.broadcast(agents.Dying(worker.rank, exit_code))
            self._is_dying(worker.rank, exit_code)

    def _is_dying(self, rank: int, exit_code: int) -> None:
        self._change(rank, dying=True, reachable=False)
        self._tell_end(rank, exit_code, failed=True)

    def _ended(self, worker: Worker) -> None:
        if worker.socket.fileno() in self._selector.get_map():
            self._receive(worker)  # what it said before it ended
        if self._rank(worker.rank).alive:
            if worker.socket.fileno() in self._selector.get_map():
                self._selector.unregister(worker.socket)
            self._reap(worker)

    def _reap(self, worker: Worker) -> None:
        self._selector.unregister(worker.pidfd)
        if worker.lifeline.released in self._selector.get_map():
            self._selector.unregister(worker.lifeline.released)
        exit_code = worker.reap()
        rank = self._rank(worker.rank)
        told = "nothing" if rank.dying else rank.told
        if rank.raised:
            exit_code, told = STATUS_OF_AN_EXCEPTION, "nothing"  # it has failed, though we may have ended it
        if self._hosts is not None:
            self._reports.last_copy()
            self._hosts.broadcast(agents.Ended(worker.rank, exit_code, told))
        if exit_code != 0:
            self._reports.failed(worker, exit_code, told == "kill" and exit_code == -signal.SIGKILL)
        self._has_ended(worker.rank, exit_code, told)

    def _has_ended(self, rank: int, exit_code: int, told: str) -> None:
        known = self._rank(rank)
        self._change(rank, exit_code=exit_code, told=told)
        if not known.dying:
            failed = exit_code != 0 and told == "nothing" and not known.raised
            self._tell_end(rank, exit_code, failed)
        if told != "nothing" and self._trouble is None:
            # Where a link is cut one way, another host may have seen a failure that this one has not.
            self._detected("died", f"rank {rank} was ended by its host, which has seen a failure", [rank])

    def _tell_end(self, rank: int, exit_code: int, failed: bool) -> None:
        if failed:
            self._died(rank, exit_code)
        if self._proxies is not None and not (failed and self._goes_back()):
            self._proxies.ended(rank, failed, f"its worker process {_how_it_ended(exit_code)}")

    def _goes_back(self) -> bool:
        """Return whether the ranks are made again from a snapshot if one fails; nobody tells them of it."""
        return self._job.restarts_left > 0 and not self.interrupts and self._snapshot() is not None

    def _died(self, rank: int, exit_code: int) -> None:
        if self._in_memory() is None:
            self._local_states.rank_died(rank)
        first = self._trouble is None
        self._detected("died", f"rank {rank} {_how_it_ended(exit_code)}", [rank])
        if first:  # the others may have ended because of it
            self._blame([rank])

    def _blame(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            known = self._rank(rank)
            if rank in self._workers and known.mistake is None and known.refused is None:
                self._reports.blamed(self._workers[rank])

    def _detected(self, cause: str, text: str, ranks: Sequence[int] = ()) -> None:
        """Log a failure; tell the user of the first, the others usually follow from it."""
        text = protocol.shortened(text, MOST_TEXT)  # it goes into orders
        self._log.write("detected", cause=cause, text=text, first=self._trouble is None, ranks=list(ranks))
        if self._protection is not None and ranks:
            health: Health = "offline" if cause == "host" else "unhealthy"
            self._protection.have_failed(ranks, health, self._lost_hosts)
        if self._trouble is None:
            self._trouble = text
            self._say(f"{text}.")

    # The other hosts.

    def _leader(self) -> int:
        """Return the host that looks into hangs, logs and says what concerns all: the first that lives."""
        assert self._hosts is not None
        return min(set(range(len(self._hosts.all))) - self._lost_hosts)

    @property
    def gone_hosts(self) -> set[int]:
        """The hosts that will not start the ranks again: they are lost, or were asked to end."""
        return self._lost_hosts | self.leaving

    @property
    def takes_in(self) -> bool:
        """Whether hosts wait that the next start is to have."""
        return self._job.takes_in

    @property
    def is_free(self) -> bool:
        """Whether the next start is none of those that are counted."""
        return self._job.is_free

    @property
    def mistakes(self) -> frozenset[str]:
        """What the ranks' programs did wrong before their first step; none where a host, which would not
        know of it in the next start, is gone."""
        return frozenset() if self.gone_hosts else mistakes(self._job.ranks)

    @property
    def kept_in_memory(self) -> int | None:
        """The step that the memory tier had of all ranks as the first of them failed."""
        return self._job.in_memory

    def stays_without(self, host: int) -> bool:
        """Whether the memory tier has the step that it had, also without this host."""
        return self._protection is not None and (
            self._protection.step_that_stays(self._lost_hosts | {host}) is not None
        )

    @property
    def ranks_of_lost_hosts(self) -> tuple[set[int], set[int]]:
        """Return those whose state is for this host to write to files, and those of which no host has it."""
        if self._protection is None:
            return set(), set()
        return self._protection.ranks_of(self._lost_hosts)

    @property
    def end(self) -> tuple[int, str]:
        """The newest step that was begun here, and the first failure that was heard of."""
        return self._newest_begun, self._trouble or ""

    def _leads(self) -> bool:
        return self._hosts is None or self._leader() == self._hosts.index

    def _say(self, text: str) -> None:
        if self._log.leading:
            say(text)

    def _hear_hosts(self) -> None:
        assert self._hosts is not None
        for arrived in self._hosts.take():
            self._take(arrived)

    def _take(self, arrived: Arrived | Unclear | HostLost) -> None:
        assert self._hosts is not None
        if isinstance(arrived, HostLost):
            self._lose(arrived)
        elif isinstance(arrived, Unclear):
            self._note_nonsense(self._hosts.name(arrived.host), arrived.error)
        else:
            self._hear_or_note(arrived)

    def _hear_or_note(self, arrived: Arrived) -> None:
        assert self._hosts is not None
        try:
            self._hear_host(arrived)
        except Exception as error:
            self._note_nonsense(self._hosts.name(arrived.host), error)

    def _hear_host(self, arrived: Arrived) -> None:
        match arrived.message:
            case agents.Said(rank, text):
                self._hear(self._rank(rank).rank, protocol.decode(text.encode()))
            case agents.Ended(rank, exit_code, told):
                self._has_ended(self._rank(rank).rank, exit_code, told)
            case agents.Dying(rank, exit_code):
                self._is_dying(self._rank(rank).rank, exit_code)
            case agents.Order(rank, text):
                self._pass_on(self._workers[rank], protocol.decode(text.encode()), arrived.host)
            case message if isinstance(message, agents.OF_PROXIES) and self._proxies is not None:
                self._proxies.hear_host(arrived)
            case agents.ProcessStopped(rank):
                self._investigation.hear_stopped(self._rank(rank).rank)
            case agents.RingPart(rank, size, place):
                self._local_states.copies.write(self._rank(rank).rank, size, place, arrived.data)
            case message if isinstance(message, agents.OF_MEMORY) and self._protection is not None:
                self._protection.hear(arrived.host, message)
            case agents.TakesIn(who) if self._elastic:
                self._wants_in = protocol.shortened(who, MOST_TEXT)
                self._job = replace(self._job, takes_in=True, is_free=True)
            case agents.WantSave(step) if 0 < step < ring_format.LAST_STEP:
                wishes.want_save_after([worker.ring_fd for worker in self._workers.values()], step)
            case agents.HostAlarm() as alarm:
                self._hear_alarm(arrived.host, alarm)
            case message:
                self._hear_of_stacks(arrived.host, message, arrived.data)

    def _hear_of_stacks(self, host: int, message: agents.AgentMessage, data: bytes) -> None:
        match message:
            case agents.StacksWanted(rank):
                self._send_stacks(host, self._workers[rank])
            case agents.Stacks(rank, driver):
                name = "" if self._hosts is None else self._hosts.name(host)
                lines = [line[:MOST_OF_A_LINE] for line in driver[:MOST_LINES]]
                self._investigation.hear_stacks(self._rank(rank).rank, data.decode(), name, lines)
            case _:
                raise ProtocolError(f"Nobody here has a use for {message!r:.200}.")

    def _hear_alarm(self, host: int, alarm: agents.HostAlarm) -> None:
        blamed = [self._rank(rank).rank for rank in alarm.blamed]
        if alarm.cause == "signal":
            self.leaving.add(host)
            self._job = replace(self._job, is_free=self._job.is_free or self._elastic)
        self._alarm(alarm.cause, alarm.text, blamed)
        self._blame(blamed)

    def _pass_on(self, worker: Worker, order: WorkerMessage, host: int) -> None:
        """Give a rank of this host an order of another's; tell that if the rank is stopped."""
        assert self._hosts is not None
        if worker.is_stopped():
            self._hosts.send(host, agents.ProcessStopped(worker.rank))
        worker.send(order)  # who can't be asked does not answer

    def _ask_for_stacks(self, rank: int) -> None:
        assert self._hosts is not None
        self._hosts.send(self._hosts.host_of(rank), agents.StacksWanted(rank))

    def _send_stacks(self, host: int, worker: Worker) -> None:
        """Send another host the Python stacks of a rank; nobody waits for them here."""
        hosts, file = self._hosts, stacks_of(worker, self._registrations.get(worker.rank))
        assert hosts is not None

        def send() -> None:
            text = "" if file is None else read_stacks(file, STACK_SECONDS)
            driver = [line[:MOST_OF_A_LINE] for line in xid_lines(DRIVER_SECONDS)]
            hosts.send(host, agents.Stacks(worker.rank, driver), text.encode())

        threading.Thread(target=send, name="jitckpt-stacks", daemon=True).start()

    def _lose(self, lost: HostLost) -> None:
        """A host is gone: its ranks have ended, as far as this job is concerned."""
        assert self._hosts is not None
        if self._proxies is not None and self._proxies.ends_without(lost.host):
            return
        ranks = self._hosts.all[lost.host].ranks
        living = [rank for rank in ranks if self._rank(rank).alive]
        if not living and (lost.host in self.leaving or not starts_again(self._job)):
            return  # it had nothing more to do
        self._lost_hosts.add(lost.host)
        self.losses[lost.host] = lost.reason
        self._job = replace(
            self._job, is_free=self._job.is_free or self._elastic, in_memory=self._in_memory()
        )
        text = f"{self._hosts.name(lost.host)} with {_listed(ranks)} is lost: {lost.reason}"
        takes_over = self._leads() and not self._log.leading
        if takes_over:
            self._log.leading, self._trouble = True, None  # what this host noticed before, nobody has heard
        elif self._trouble is not None:
            self._say(f"{text}.")
        self._detected("host", text, ranks)
        if self._proxies is not None:
            self._proxies.lose_host(lost.host)
        for rank in living:
            self._change(rank, exit_code=-signal.SIGKILL, told="kill", reachable=False)
            if self._proxies is not None:
                self._proxies.ended(rank, failed=True, how="its host is lost")
        if takes_over:
            self._tell_what_was_done()

    def _tell_what_was_done(self) -> None:
        """Tell what was decided before it was known that the host which was to tell of it is lost."""
        saving = tuple(rank.rank for rank in self._job.ranks if rank.save == "ordered")
        if self._job.ending_since is not None or self._job.local_state_begun_at is not None:
            self._tell_what_is_saved()
        elif saving:
            self._tell_who_saves(saving)

    def _order(self, rank: int, order: WorkerMessage) -> str | None:
        """Give a rank of any host an order; return why that can't be done, or None."""
        if rank in self._workers:
            return self._workers[rank].send(order)
        assert self._hosts is not None
        message = agents.Order(rank, protocol.encode(order).decode())
        self._hosts.send(self._hosts.host_of(rank), message)
        return None

    # What is done.

    def _let_end(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            wishes.let_end(self._workers[rank].ring_fd)
            self._change(rank, let_end=True)

    def _order_save(self, ranks: tuple[int, ...]) -> None:
        assert self._trouble is not None
        if self._job.save_ordered_at is None:
            self._job = replace(self._job, save_ordered_at=time.monotonic())
        order = protocol.Save(
            self._save_id,
            reason=self._trouble,
            deadline=self._job.save_deadline,
            is_partial=self._job.has_lost_shard(),
        )
        self._tell_who_saves(ranks)
        for rank in ranks:
            problem = self._workers[rank].send(order) if rank in self._workers else None
            self._change(rank, save="ordered" if problem is None else "failed")
            if problem is not None:
                self._log.write("warning", rank=rank, text=f"rank {rank} can't be told to save: {problem}")

    def _tell_who_saves(self, ranks: tuple[int, ...]) -> None:
        deadline = self._job.save_deadline
        self._say(f"{_listed(ranks)} may take {deadline:g} s to save the state.")
        self._log.write("save_ordered", save_id=self._save_id, ranks=ranks, deadline=deadline)

    def _end(self, kill: tuple[int, ...], terminate: tuple[int, ...]) -> None:
        if self._job.ending_since is None:
            self._job = replace(self._job, ending_since=time.monotonic())
            self._newest_begun = self._newest_step() or 0
            self._tell_what_is_saved()
        self._log.write("ranks_ended", kill=kill, terminate=terminate)
        for rank in kill:
            if rank in self._workers:
                self._workers[rank].signal(signal.SIGKILL)
            self._change(rank, told="kill")
        for rank in terminate:
            if rank in self._workers:
                self._workers[rank].signal(self.interrupts[0] if self.interrupts else signal.SIGTERM)
            self._change(rank, told="terminate")

    def _in_memory(self) -> int | None:
        """Return the step that the memory tier has of all ranks, without the hosts that are lost."""
        return None if self._protection is None else self._protection.step_that_stays(self._lost_hosts)

    def _tell_what_is_saved(self) -> None:
        steps = whole_steps(self._job.ranks)
        if not steps and not training_is_over(self._job.ranks) and self._job.in_memory is not None:
            self._log.write("kept_in_memory", step=self._job.in_memory, newest=self._newest_step())
            no_file = "" if self._elastic else "; no file is needed"  # for other ranks there is
            self._say(f"the state after step {self._job.in_memory} is in memory{no_file}.")
        elif steps:
            self._log.write("saved", step=max(steps))
            self._say(f"the state after step {max(steps)} is saved.")
        elif training_is_over(self._job.ranks):
            self._say("the training had ended on all ranks before that, so nothing is done again.")
        elif self._goes_back():
            self._say(f"all ranks go back to the snapshot after step {self._snapshot()}.")
        elif self._registrations:
            reasons = ", ".join(f"rank {rank.rank} {_why_not_saved(rank)}" for rank in self._job.ranks)
            self._log.write("not_saved", text=reasons, step=self._newest_step())
            self._say(f"the state could not be saved: {reasons}.")
        else:
            if self._proxies is not None and self._proxies.switched_off:
                self._say(f"the failure was not recovered from, as was said: {self._proxies.switched_off}")
            self._say(
                "no rank has come through jitckpt.init yet, so there is no state to save; behind it, and "
                "with save_every=... for failures of all replicas (docs/guides/user-level.md), the job goes "
                "on from a save."
            )

    def _newest_step(self) -> int | None:
        """Return the newest step that a rank of this host has begun; None where that can't be told."""
        try:
            return local_state.newest_step([worker.ring_fd for worker in self._workers.values()])
        except JitckptError as error:
            self._log.write("warning", text=str(error))
            return None

    def _begin_local_states(self) -> None:
        if self._job.ending_since is None:  # all ranks have ended by themselves
            self._tell_what_is_saved()
        self._job = replace(self._job, local_state_begun_at=time.monotonic())
        is_in_memory = self._job.in_memory is not None
        self._local_states.all_have_ended(whole_steps(self._job.ranks), is_in_memory=is_in_memory)


def _bound(call: Callable[[Worker], None], worker: Worker) -> Callable[[], None]:
    return lambda: call(worker)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {_signal_name(-exit_code)}"
    return f"ended with exit status {exit_code}"


def _why_not_saved(rank: Rank) -> str:
    if rank.save == "ended":
        return f"saved step {rank.saved_step} of shard {rank.shard} alone"
    if rank.save == "failed":
        return "could not save"
    if rank.raised:
        return "raised an exception"
    if not rank.alive or rank.dying:
        return "has ended"
    if not rank.registered:
        return "had not called jitckpt.init"
    return "did not save in time" if rank.save == "ordered" else "had finished its training"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
