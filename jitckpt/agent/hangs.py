"""Hangs that ranks report: transparent mode sees to them first; then all ranks are asked where they are."""

from collections.abc import Mapping

from jitckpt.agent.control.known import Known
from jitckpt.agent.control.other_hosts import OtherHosts
from jitckpt.agent.failures import Failures
from jitckpt.agent.investigation import Investigation
from jitckpt.agent.local_states import LocalStates
from jitckpt.agent.proxies.control import Proxies
from jitckpt.wire import protocol


class Hangs:
    """Of one start."""

    def __init__(
        self,
        known: Known,
        hosts: OtherHosts,
        *,
        investigation: Investigation,
        proxies: Proxies | None,
        registrations: Mapping[int, protocol.Registered],
        local_states: LocalStates,
        failures: Failures,
    ) -> None:
        self._known, self._hosts, self._proxies = known, hosts, proxies
        self._registrations, self._local_states = registrations, local_states
        self._failures = failures
        self.investigation = investigation
        self._waiting: dict[int, protocol.Hang] = {}  # that are transparent mode's affair first

    def hear(self, rank: int, message: protocol.Hang) -> None:
        """Look into it, unless it is still transparent mode's affair."""
        if self._recovers():
            self._waiting[rank] = message
            return
        self._known.note(suspected=True)
        if self._hosts.leads():
            self.investigation.begin(rank, message, self._known.askable())

    def look(self) -> None:
        """Look into what transparent mode has given up; raise an alarm once it is known who hangs."""
        self.look_into_waiting()
        investigation = self.investigation
        if not self._known.job.alarmed and (
            found := investigation.verdict(self._known.askable(), self._known.absent())
        ):
            blamed = investigation.blamed
            # Before ranks end.
            investigation.begin_report(self._registrations, self._local_states.directory())
            self._failures.tell_alarm("hang", found, blamed)
        investigation.finish_report()

    def look_into_waiting(self) -> None:
        """Look into those that transparent mode was to see to, once it has given up."""
        while self._waiting and not self._recovers():
            self.hear(*self._waiting.popitem())

    def _recovers(self) -> bool:
        return self._proxies is not None and self._proxies.recovers

    def next_looks(self) -> list[float | None]:
        """When to look again."""
        looks = [self.investigation.report_due]
        return looks if self._known.job.alarmed else [*looks, self.investigation.next_look]
