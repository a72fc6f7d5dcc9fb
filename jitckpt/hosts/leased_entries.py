"""What one process has at a coordination service for as long as it lives: entries under a lease of its own.

A thread keeps the lease alive, and puts the entries anew where it has ended, as after a time without the
service. Nobody waits for that.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from jitckpt.errors import HostsError
from jitckpt.hosts.coordination import Coordination, CoordinationError, LeaseLost

KEPT = 3  # how often within its time a lease is kept alive
RETRY_SECONDS = 1.0  # until what could not be put is tried again

# Puts an entry under a lease. Raises CoordinationError, or HostsError if there is to be none.
Put = Callable[[int], None]


class LeasedEntries:
    """Of one process. May be used by any thread."""

    def __init__(self, service: Coordination, silence: float) -> None:
        """silence: seconds after which the process counts as gone."""
        self._service, self._silence, self._lease = service, silence, 0
        self._wanted: dict[str, Put] = {}
        self._there: set[str] = set()
        self._lock = threading.Lock()
        self._changed, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._keep, name="jitckpt-entries", daemon=True)
        self._thread.start()

    def keep(self, wanted: Mapping[str, Put]) -> None:
        """Have these entries from now on, and no others."""
        with self._lock:
            self._wanted = dict(wanted)
            self._there.clear()
        self._changed.set()

    def close(self) -> None:
        """Keep nothing any more: what is there goes with the lease."""
        self._closing = True
        self._changed.set()
        self._thread.join()

    def _keep(self) -> None:
        pause = 0.0
        while not self._closing:
            self._changed.wait(pause)
            self._changed.clear()
            if self._closing:
                return
            try:
                self._look_after_entries()
                pause = self._silence / KEPT
            except LeaseLost:
                self._lease, pause = 0, 0.0
            except CoordinationError:
                pause = RETRY_SECONDS

    def _look_after_entries(self) -> None:
        with self._lock:
            wanted = dict(self._wanted)
            if not self._lease:
                self._there.clear()
        if not self._lease:
            self._lease = self._service.lease(self._silence)
        else:
            self._service.keep_alive(self._lease)
        for name, put in wanted.items():
            if name not in self._there:
                with suppress(HostsError):
                    put(self._lease)
                with self._lock:
                    if self._wanted.get(name) is put:
                        self._there.add(name)
