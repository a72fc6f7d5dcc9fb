"""Who has come to a launcher by `jitckpt suspend` and the like, and what they are told."""

import selectors
from collections.abc import Callable
from pathlib import Path

from jitckpt.system.job_socket import Caller, JobSocket
from jitckpt.wire.checked import ProtocolError
from jitckpt.wire.commands import ToLauncher

STATUS_FAILED = 1  # the job goes on as if it had not been asked


class Callers:
    """Of one start of the ranks. `waits` hears of what is under way."""

    def __init__(self, directory: Path, asked: Callable[[Caller, ToLauncher], None]) -> None:
        """directory: where commands look for the launcher. asked: hears what they want. Raises OSError."""
        self._socket, self._asked = JobSocket(directory), asked
        self._selector = selectors.EpollSelector()
        self._selector.register(self._socket.listener, selectors.EVENT_READ)
        self.waits: Caller | None = None
        self._callers: set[Caller] = set()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector's owner call what it finds as data when something comes."""
        selector.register(self._selector, selectors.EVENT_READ, lambda: self.serve(0))

    def serve(self, timeout: float) -> None:
        """Hear who has come, and what they want."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._socket.listener:
                caller = self._socket.accept()
                if caller is not None:
                    self._callers.add(caller)
                    self._selector.register(caller.connection, selectors.EVENT_READ, caller)
            elif key.data in self._callers:
                self._hear(key.data)

    def tell(self, text: str, status: int | None = None) -> None:
        """Tell who waits; with a status nobody does any more."""
        if self.waits is not None:
            self.waits.hear(text, status)
        if status is not None:
            self.waits = None

    def close(self) -> None:
        """The ranks have ended."""
        self.tell("The job has ended.", STATUS_FAILED)
        self._socket.close()
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()

    def _hear(self, caller: Caller) -> None:
        try:
            asked = caller.asks()
        except ProtocolError as error:
            caller.hear(f"The launcher does not understand what it is asked: {error}", STATUS_FAILED)
            return
        if asked is None:
            self._drop(caller)
        else:
            self._asked(caller, asked)

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.discard(caller)
        if caller is self.waits:
            self.waits = None
        caller.close()
