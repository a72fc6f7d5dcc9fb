"""What a rank says: to its agent, or where there is none to the directory's events; and to the user."""

import warnings
from dataclasses import asdict

from jitckpt.bindings.interpose import Native
from jitckpt.errors import NativeError
from jitckpt.events import EventLog
from jitckpt.wire import protocol


class Reporter:
    """Speaks for one rank."""

    def __init__(self, events: EventLog, rank: int, has_agent: bool) -> None:
        self._events, self._rank = events, rank
        self._native: Native | None = None
        self._said: set[str] = set()
        self.has_agent = has_agent

    def speaks_through(self, native: Native | None) -> None:
        """Have the library tell the agent; None: no more."""
        self._native = native

    def report(self, message: protocol.WorkerMessage) -> None:
        """Tell the agent; without one, or after its death, the checkpoint directory's events."""
        if self._native is not None and self.has_agent:
            try:
                self._native.report(protocol.encode(message))
                return
            except NativeError:
                self.has_agent = False  # it is dead; the library has the state saved all the same
        self._events.write(message.type, **asdict(message))

    def warn(self, text: str) -> None:
        """Warn the user, and tell the agent of it."""
        warnings.warn(f"jitckpt: {text}", RuntimeWarning, stacklevel=3)
        self.report(protocol.Warning(self._rank, text))

    def warn_on_first(self, text: str) -> None:
        """Warn of what all ranks see alike."""
        if self._rank == 0:
            self.warn(text)

    def warn_once(self, text: str) -> None:
        """Warn of what all ranks see alike, and in every step."""
        if text not in self._said:
            self._said.add(text)
            self.warn_on_first(text)
