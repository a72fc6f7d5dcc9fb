"""What the agents of the other hosts say, and that one of them is lost: acted on by the control thread."""

import signal
import threading
from collections.abc import Mapping

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.nonsense import Nonsense
from jitckpt.agent.control.other_hosts import OtherHosts
from jitckpt.agent.control.requests import Requests
from jitckpt.agent.control.telling import MOST_TEXT, Telling, listed
from jitckpt.agent.failures import Failures
from jitckpt.agent.investigation import DRIVER_SECONDS, STACK_SECONDS, Investigation, stacks_of
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.protection import MemoryProtection
from jitckpt.agent.proxies.control import Proxies
from jitckpt.agent.rank_messages import RankMessages
from jitckpt.decisions.recovery import starts_again
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, HostLost, Unclear
from jitckpt.ring import format as ring_format
from jitckpt.ring import wishes
from jitckpt.system.kernel_log import MOST_LINES, xid_lines
from jitckpt.system.stacks import read_stacks
from jitckpt.wire import agents, protocol
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.protocol import WorkerMessage

MOST_OF_A_LINE = 500  # characters of the kernel's log


class HostMessages:
    """Whatever they say, the control thread goes on: `take` notes what makes no sense."""

    def __init__(
        self,
        known: Known,
        telling: Telling,
        hosts: OtherHosts,
        *,
        messages: RankMessages,
        failures: Failures,
        nonsense: Nonsense,
        requests: Requests,
        log: EventLog,
        workers: Mapping[int, Worker],
        registrations: Mapping[int, protocol.Registered],
        investigation: Investigation,
        local_states: LocalStates,
        proxies: Proxies | None,
        protection: MemoryProtection | None,
        elastic: bool,
    ) -> None:
        """elastic: the job may go on with fewer hosts, and takes in others."""
        self._known, self._telling, self._hosts = known, telling, hosts
        self._messages, self._failures = messages, failures
        self._nonsense, self._requests, self._log = nonsense, requests, log
        self._workers, self._registrations = workers, registrations
        self._investigation, self._local_states = investigation, local_states
        self._proxies, self._protection, self._elastic = proxies, protection, elastic

    def take(self, arrived: Arrived | Unclear | HostLost) -> None:
        if isinstance(arrived, HostLost):
            self._lose(arrived)
        elif isinstance(arrived, Unclear):
            self._nonsense.note(self._hosts.name(arrived.host), arrived.error)
        else:
            try:
                self._hear(arrived)
            except Exception as error:
                self._nonsense.note(self._hosts.name(arrived.host), error)

    def _hear(self, arrived: Arrived) -> None:
        match arrived.message:
            case agents.Said(rank, text):
                self._messages.hear(self._known.rank(rank).rank, protocol.decode(text.encode()))
            case agents.Ended(rank, exit_code, told):
                self._failures.has_ended(self._known.rank(rank).rank, exit_code, told)
            case agents.Dying(rank, exit_code):
                self._failures.dies(self._known.rank(rank).rank, exit_code)
            case agents.Order(rank, text):
                self._pass_on(self._workers[rank], protocol.decode(text.encode()), arrived.host)
            case message if isinstance(message, agents.OF_PROXIES) and self._proxies is not None:
                self._proxies.hear_host(arrived)
            case agents.ProcessStopped(rank):
                self._investigation.hear_stopped(self._known.rank(rank).rank)
            case agents.RingPart(rank, size, place):
                self._local_states.copies.write(self._known.rank(rank).rank, size, place, arrived.data)
            case message if isinstance(message, agents.OF_MEMORY) and self._protection is not None:
                self._protection.hear(arrived.host, message)
            case agents.TakesIn(who) if self._elastic:
                self._requests.wants_in = protocol.shortened(who, MOST_TEXT)
                self._known.note(takes_in=True, is_free=True)
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
                lines = [line[:MOST_OF_A_LINE] for line in driver[:MOST_LINES]]
                self._investigation.hear_stacks(
                    self._known.rank(rank).rank, data.decode(), self._hosts.name(host), lines
                )
            case agents.LastWords():
                pass  # too late: this host's ranks are not given away any more
            case _:
                raise ProtocolError(f"Nobody here has a use for {message!r:.200}.")

    def _hear_alarm(self, host: int, alarm: agents.HostAlarm) -> None:
        blamed = [self._known.rank(rank).rank for rank in alarm.blamed]
        if alarm.cause == "signal":
            self._hosts.leaving.add(host)
            self._known.note(is_free=self._known.job.is_free or self._elastic)
        self._failures.alarm(alarm.cause, alarm.text, blamed)
        self._failures.blame(blamed)

    def _pass_on(self, worker: Worker, order: WorkerMessage, host: int) -> None:
        """Give a rank of this host an order of another's; tell that if the rank is stopped."""
        if worker.is_stopped():
            self._hosts.connected.send(host, agents.ProcessStopped(worker.rank))
        worker.send(order)  # who can't be asked does not answer

    def _send_stacks(self, host: int, worker: Worker) -> None:
        """Send another host the Python stacks of a rank; nobody waits for them here."""
        hosts, file = self._hosts.connected, stacks_of(worker, self._registrations.get(worker.rank))

        def send() -> None:
            text = "" if file is None else read_stacks(file, STACK_SECONDS)
            driver = [line[:MOST_OF_A_LINE] for line in xid_lines(DRIVER_SECONDS)]
            hosts.send(host, agents.Stacks(worker.rank, driver), text.encode())

        threading.Thread(target=send, name="jitckpt-stacks", daemon=True).start()

    def _lose(self, lost: HostLost) -> None:
        """A host is gone: its ranks have ended, as far as this job is concerned."""
        if self._proxies is not None and self._proxies.ends_without(lost.host):
            return
        ranks = self._hosts.connected.all[lost.host].ranks
        living = [rank for rank in ranks if self._known.rank(rank).alive]
        needed = bool(living) if ranks else self._needs_lead()
        if not needed and (lost.host in self._hosts.leaving or not starts_again(self._known.job)):
            return  # it had nothing more to do
        self._hosts.lost.add(lost.host)
        self._hosts.losses[lost.host] = lost.reason
        self._known.note(
            is_free=self._known.job.is_free or self._elastic, in_memory=self._failures.in_memory()
        )
        had = listed(ranks) if ranks else "the lead and the ranks' store"
        text = f"{self._hosts.name(lost.host)} with {had} is lost: {lost.reason}"
        takes_over = self._hosts.leads() and not self._log.leading
        if takes_over:
            # What this host noticed before, nobody has heard.
            self._log.leading, self._telling.trouble = True, None
        elif self._telling.trouble is not None:
            self._telling.say(f"{text}.")
        self._failures.detected("host", text, ranks)
        if self._proxies is not None:
            self._proxies.lose_host(lost.host)
        for rank in living:
            self._known.change(rank, exit_code=-signal.SIGKILL, told="kill", reachable=False)
            if self._proxies is not None:
                self._proxies.ended(rank, failed=True, how="its host is lost")
        if not ranks:
            self._known.note(alarmed=True)  # the ranks run, and can't go on for long
        if takes_over:
            self._tell_what_was_done()

    def _needs_lead(self) -> bool:
        """Whether a host is missed that has no ranks, but the lead and the ranks' store."""
        ranks = self._known.job.ranks
        going_on = any(rank.alive and not rank.finished for rank in ranks)
        return going_on and not any(rank.failed for rank in ranks)

    def _tell_what_was_done(self) -> None:
        """Tell what was decided before it was known that the host which was to tell of it is lost."""
        job = self._known.job
        saving = tuple(rank.rank for rank in job.ranks if rank.save == "ordered")
        if job.ending_since is not None or job.local_state_begun_at is not None:
            self._telling.what_is_saved()
        elif saving:
            self._telling.who_saves(saving)
