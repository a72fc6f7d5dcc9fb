"""Failures of a start's ranks and hosts, as the control thread notices them: told, blamed and acted on."""

import signal
from collections.abc import Callable, Mapping, Sequence

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.other_hosts import OtherHosts
from jitckpt.agent.control.own_workers import STATUS_OF_AN_EXCEPTION
from jitckpt.agent.control.telling import Telling, how_it_ended
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.protection import MemoryProtection
from jitckpt.agent.proxies.control import Proxies
from jitckpt.agent.reports import Reports
from jitckpt.decisions.memory_state import Health
from jitckpt.wire import agents


class Failures:
    """Of one start; on all hosts alike."""

    def __init__(
        self,
        known: Known,
        telling: Telling,
        hosts: OtherHosts,
        workers: Mapping[int, Worker],
        local_states: LocalStates,
        *,
        proxies: Proxies | None,
        protection: MemoryProtection | None,
        reports: Reports,
        goes_back: Callable[[], bool],
    ) -> None:
        """goes_back: whether the ranks are made again from a snapshot if one fails."""
        self._known, self._telling, self._hosts, self._workers = known, telling, hosts, workers
        self._local_states, self._proxies, self._protection = local_states, proxies, protection
        self._reports, self._goes_back = reports, goes_back

    def in_memory(self) -> int | None:
        """Return the step that the memory tier has of all ranks, without the hosts that are lost."""
        return None if self._protection is None else self._protection.step_that_stays(self._hosts.lost)

    def alarm(self, cause: str, text: str, ranks: Sequence[int] = ()) -> None:
        self.detected(cause, text, ranks)
        self._known.note(alarmed=True)

    def tell_alarm(self, cause: str, text: str, blamed: Sequence[int] = ()) -> None:
        """Raise an alarm on all hosts about what only this one knows; blamed: the ranks that caused it."""
        self._hosts.tell(agents.HostAlarm(cause, text, list(blamed)))
        self.alarm(cause, text, blamed)
        self.blame(blamed)

    def blame(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            known = self._known.rank(rank)
            if rank in self._workers and known.mistake is None and known.refused is None:
                self._reports.blamed(self._workers[rank])

    def detected(self, cause: str, text: str, ranks: Sequence[int] = ()) -> None:
        """Ranks have failed, or something of theirs has."""
        if self._protection is not None and ranks:
            health: Health = "offline" if cause == "host" else "unhealthy"
            self._protection.have_failed(ranks, health, self._hosts.lost)
        self._telling.failure(cause, text, ranks)

    def raised(self, rank: int) -> None:
        """An exception has ended a rank's program; its process may take a while."""
        self._known.change(rank, raised=True)
        self._died(rank, STATUS_OF_AN_EXCEPTION)

    def own_dies(self, worker: Worker, exit_code: int) -> None:
        """The kernel ends a worker of this host, with a failure: all act on it before it has ended."""
        self._tell(agents.Dying(worker.rank, exit_code))
        self.dies(worker.rank, exit_code)

    def own_has_ended(self, worker: Worker, exit_code: int, told: agents.Told) -> None:
        self._tell(agents.Ended(worker.rank, exit_code, told))
        if exit_code != 0:
            self._reports.failed(worker, exit_code, told == "kill" and exit_code == -signal.SIGKILL)
        self.has_ended(worker.rank, exit_code, told)

    def _tell(self, message: agents.AgentMessage) -> None:
        if not self._hosts.is_alone:
            self._reports.last_copy()
            self._hosts.tell(message)

    def dies(self, rank: int, exit_code: int) -> None:
        self._known.change(rank, dying=True, reachable=False)
        self._tell_end(rank, exit_code, failed=True)

    def has_ended(self, rank: int, exit_code: int, told: agents.Told) -> None:
        known = self._known.rank(rank)
        self._known.change(rank, exit_code=exit_code, told=told)
        if not known.dying:
            failed = exit_code != 0 and told == "nothing" and not known.raised
            self._tell_end(rank, exit_code, failed)
        if told != "nothing" and self._telling.trouble is None:
            # Where a link is cut one way, another host may have seen a failure that this one has not.
            self.detected("died", f"rank {rank} was ended by its host, which has seen a failure", [rank])

    def _tell_end(self, rank: int, exit_code: int, failed: bool) -> None:
        if failed:
            self._died(rank, exit_code)
        if self._proxies is not None and not (failed and self._goes_back()):
            self._proxies.ended(rank, failed, f"its worker process {how_it_ended(exit_code)}")

    def _died(self, rank: int, exit_code: int) -> None:
        if self.in_memory() is None:
            self._local_states.rank_died(rank)
        first = self._telling.trouble is None
        self.detected("died", f"rank {rank} {how_it_ended(exit_code)}", [rank])
        if first:  # the others may have ended because of it
            self.blame([rank])
