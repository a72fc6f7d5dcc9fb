"""The agent's control thread: hears of what happens to the workers, does what recovery.decide says."""

import selectors
import threading
import time
from collections.abc import Callable, Sequence

from jitckpt.agent.actions import Actions
from jitckpt.agent.control.known import Known
from jitckpt.agent.control.nonsense import Nonsense
from jitckpt.agent.control.other_hosts import OtherHosts
from jitckpt.agent.control.own_workers import Heard, OwnWorkers
from jitckpt.agent.control.requests import Requests
from jitckpt.agent.control.stopped_ranks import StoppedRanks
from jitckpt.agent.control.telling import Telling, signal_name
from jitckpt.agent.failures import Failures
from jitckpt.agent.hangs import Hangs
from jitckpt.agent.host_messages import HostMessages
from jitckpt.agent.investigation import Investigation
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.protection import MemoryProtection
from jitckpt.agent.proxies.control import Proxies
from jitckpt.agent.rank_messages import RankMessages
from jitckpt.agent.reports import Reports
from jitckpt.decisions.recovery import (
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
    mistakes,
)
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, HostLost, Hosts, Unclear
from jitckpt.wire import agents, protocol
from jitckpt.wire.protocol import WorkerMessage

SIGNALS_HEARD_WITHIN = 0.2  # seconds


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
        self._log, self._reports, self._snapshot = log, reports, snapshot
        self._hosts, self._proxies, self._protection = OtherHosts(hosts), proxies, protection
        numbers = set(self._workers) if hosts is None else {rank for host in hosts.all for rank in host.ranks}
        ranks = tuple(Rank(rank, own=rank in self._workers) for rank in sorted(numbers))
        self._known = Known(
            KnownJob(ranks, time.monotonic(), save_deadline, restarts_left, mistakes_before=mistakes_before)
        )
        self._done = threading.Event()
        self._requests = Requests(self._done.is_set)
        self._registrations: dict[int, protocol.Registered] = {}
        self._local_states = self._make_local_states(hosts)
        self._telling = Telling(
            self._known,
            log,
            self._workers,
            save_id=save_id,
            elastic=elastic,
            snapshot=lambda: self._snapshot() if self._goes_back() else None,
            not_recovered=lambda: "" if proxies is None else proxies.switched_off,
        )
        self._failures = self._make_failures()
        self._hangs = self._make_hangs(stall_timeout, answer_within)
        self._selector = selectors.DefaultSelector()
        nonsense = Nonsense(log)
        heard = Heard(self._act_on, self._failures.own_dies, self._failures.own_has_ended)
        self._own = OwnWorkers(self._workers, self._known, self._selector, heard, nonsense)
        self._messages = self._make_messages(save_id)
        self._host_messages = self._make_host_messages(nonsense, elastic=elastic)
        self._actions = self._make_actions(save_id)
        self._stopped = StoppedRanks(self._known, self._workers, log)
        self._said_before = said_before
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None

    def _make_local_states(self, hosts: Hosts | None) -> LocalStates:
        return LocalStates(
            self._workers,
            self._registrations,
            hosts,
            self._hosts.lost,
            self._hosts.leads,
            self._log,
            self._reports.write_local_states,
            wake=self._requests.wake,
        )

    def _make_failures(self) -> Failures:
        return Failures(
            self._known,
            self._telling,
            self._hosts,
            self._workers,
            self._local_states,
            proxies=self._proxies,
            protection=self._protection,
            reports=self._reports,
            goes_back=self._goes_back,
        )

    def _make_hangs(self, stall_timeout: float, answer_within: float) -> Hangs:
        return Hangs(
            self._known,
            self._hosts,
            investigation=Investigation(
                self._workers,
                self._order,
                self._log,
                stall_timeout,
                answer_within,
                ask_for_stacks=lambda rank: self._hosts.tell_host_of(rank, agents.StacksWanted(rank)),
            ),
            proxies=self._proxies,
            registrations=self._registrations,
            local_states=self._local_states,
            failures=self._failures,
        )

    def _make_messages(self, save_id: int) -> RankMessages:
        return RankMessages(
            self._known,
            self._telling,
            self._failures,
            self._hangs,
            self._log,
            save_id=save_id,
            workers=self._workers,
            registrations=self._registrations,
            watch_lifeline=self._own.watch_lifeline,
            all_registered=lambda: None if self._proxies is None else self._proxies.can_restart(),
        )

    def _make_host_messages(self, nonsense: Nonsense, *, elastic: bool) -> HostMessages:
        return HostMessages(
            self._known,
            self._telling,
            self._hosts,
            messages=self._messages,
            failures=self._failures,
            nonsense=nonsense,
            requests=self._requests,
            log=self._log,
            workers=self._workers,
            registrations=self._registrations,
            investigation=self._hangs.investigation,
            local_states=self._local_states,
            proxies=self._proxies,
            protection=self._protection,
            elastic=elastic,
        )

    def _make_actions(self, save_id: int) -> Actions:
        return Actions(
            self._known,
            self._telling,
            self._requests,
            workers=self._workers,
            local_states=self._local_states,
            log=self._log,
            save_id=save_id,
        )

    @property
    def interrupts(self) -> list[int]:
        """The signals that have asked the agent to end."""
        return self._requests.interrupts

    @property
    def ranks(self) -> Sequence[Rank]:
        """What is known of all ranks of the job. For its own thread."""
        return self._known.job.ranks

    def interrupt(self, signum: int) -> None:
        """Take note of a signal that asks the agent to end; the second time nothing is waited for.

        May be called by a signal handler.
        """
        self._requests.interrupt(signum)

    def take_in(self, who: str) -> None:
        """Have all ranks saved, to start again with the hosts that wait: `who`, a clause. From any thread."""
        self._requests.take_in(who)

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
            self._selector.register(self._requests, selectors.EVENT_READ, self._requests.woken)
            if not self._hosts.is_alone:
                self._selector.register(self._hosts.connected.wake, selectors.EVENT_READ, self._hear_hosts)
            if self._proxies is not None:
                self._proxies.watch(self._selector)
            self._own.watch()
            for arrived in self._said_before:
                self._host_messages.take(arrived)
            self._outcome = self._supervise()
        except BaseException as error:
            self._error = error
            self._own.kill()
        finally:
            self._selector.close()
            self._local_states.give_up()  # of waiting for it
            if self._proxies is not None:
                self._proxies.close()
            self._done.set()

    def stop(self, signum: int) -> None:
        """End what still runs, at once, and free what the thread needed. To be called by the main thread."""
        if not self._done.is_set():
            self._requests.ask_to_end(signum, signum)  # as asked twice: nothing is waited for
        self.join()
        self._local_states.close()
        self._requests.close()

    def _supervise(self) -> Outcome:
        while True:
            interrupts = self._hear_all()
            if self._look_at_proxies():
                return Outcome.SUCCEEDED  # for this host: others, or another launcher, see to its ranks
            if interrupts and not self._known.job.interrupted:
                text = f"{self._hosts.this_agent()} was sent {signal_name(self.interrupts[0])}"
                self._failures.tell_alarm("signal", text)
            self._known.note(
                now=time.monotonic(),
                interrupted=interrupts > 0,
                impatient=interrupts > 1,
                in_memory=self._failures.in_memory(),
                goes_back=self._goes_back(),
            )
            if self._local_states.are_written():
                self._known.note(local_state_written=True)
            self._look_who_waits()
            self._hangs.look()
            next_look = self._stopped.look()
            match decide(self._known.job):
                case Wait(until):
                    self._wait(until, next_look)
                case LetEnd(ranks):
                    self._actions.let_end(ranks)
                case OrderSave(ranks):
                    self._actions.order_save(ranks)
                    self._hangs.investigation.read_stacks()
                case EndRanks(kill, terminate):
                    self._actions.end(kill, terminate)
                case WriteLocalState():
                    self._actions.begin_local_states()
                case Close(outcome):
                    self._close(outcome)
                    return outcome

    def _wait(self, *until: float | None) -> None:
        """Wait for something to happen, or for the first of these times."""
        looks = [*until, *self._hangs.next_looks()]
        looks += [] if self._proxies is None else [self._proxies.next_look]
        first = min((one for one in looks if one is not None), default=None)
        self._listen(None if first is None else max(0.0, first - time.monotonic()))

    def _close(self, outcome: Outcome) -> None:
        self._local_states.leave(is_impatient=self._known.job.impatient)
        self._hangs.investigation.finish_report(at_once=True)
        if outcome is Outcome.FAILED and (reason := incurable(self._known.job)):
            self._log.write("incurable", text=reason)
            self._telling.say(f"the job ends here, with no restart: {reason}.")

    def _look_who_waits(self) -> None:
        wants_in = self._requests.wants_in
        if wants_in and not self._known.job.takes_in and self._hosts.leads():
            self._hosts.tell(agents.TakesIn(wants_in))
            self._known.note(takes_in=True, is_free=True)
        if can_take_in(self._known.job):
            self._failures.alarm("hosts", wants_in)

    def _look_at_proxies(self) -> bool:
        """Return whether this host's ranks go on on another one, or are in files."""
        if self._proxies is None:
            return False
        self._proxies.look()
        if self._proxies.suspended:
            self._own.kill()
            return True
        if any(self._known.rank(rank).finished for rank in self._proxies.stragglers):
            self._known.note(suspected=True)
        if self._proxies.moved and self._proxies.leads:
            self._own.let_go()
            return False
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
                if key.fd in self._selector.get_map():  # else another one of these has removed it
                    key.data()

    def _hear_hosts(self) -> None:
        for arrived in self._hosts.connected.take():
            self._host_messages.take(arrived)

    def _act_on(self, worker: Worker, message: WorkerMessage) -> None:
        self._hosts.pass_on(worker.rank, message)
        if isinstance(message, protocol.Registered):
            self._reports.registered(worker, message)
        self._messages.hear(worker.rank, message)
        self._reports.heard(worker, message)

    def _goes_back(self) -> bool:
        """Return whether the ranks are made again from a snapshot if one fails; nobody tells them of it."""
        return self._known.job.restarts_left > 0 and not self.interrupts and self._snapshot() is not None

    def _order(self, rank: int, order: WorkerMessage) -> str | None:
        """Give a rank of any host an order; return why that can't be done, or None."""
        if rank in self._workers:
            return self._workers[rank].send(order)
        self._hosts.tell_host_of(rank, agents.Order(rank, protocol.encode(order).decode()))
        return None

    # What the agent asks once it is over.

    @property
    def losses(self) -> dict[int, str]:
        """Hosts that are lost, of those that would start the ranks again, and why."""
        return {host: why for host, why in self._hosts.losses.items() if host in self.gone_hosts}

    @property
    def leaving(self) -> set[int]:
        """Hosts whose agents were asked to end, of those that would start the ranks again."""
        return self._hosts.leaving & self.gone_hosts

    @property
    def gone_hosts(self) -> set[int]:
        """The hosts that will not start the ranks again: they are lost, or were asked to end."""
        return self._hosts.gone

    @property
    def takes_in(self) -> bool:
        """Whether hosts wait that the next start is to have."""
        return self._known.job.takes_in

    @property
    def is_free(self) -> bool:
        """Whether the next start is none of those that are counted."""
        return self._known.job.is_free

    @property
    def mistakes(self) -> frozenset[str]:
        """What the ranks' programs did wrong before their first step; none where a host, which would not
        know of it in the next start, is gone."""
        return frozenset() if self.gone_hosts else mistakes(self._known.job.ranks)

    @property
    def kept_in_memory(self) -> int | None:
        """The step that the memory tier had of all ranks as the first of them failed."""
        return self._known.job.in_memory

    def stays_without(self, host: int) -> bool:
        """Whether the memory tier has the step that it had, also without this host."""
        return self._protection is not None and (
            self._protection.step_that_stays(self._hosts.lost | {host}) is not None
        )

    @property
    def ranks_of_lost_hosts(self) -> tuple[set[int], set[int]]:
        """Return those whose state is for this host to write to files, and those of which no host has it."""
        if self._protection is None:
            return set(), set()
        return self._protection.ranks_of(self._hosts.lost)

    @property
    def end(self) -> tuple[int, str]:
        """The newest step that was begun here, and the first failure that was heard of."""
        return self._telling.newest_begun, self._telling.trouble or ""
