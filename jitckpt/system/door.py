"""A listening socket of the control thread, which must not end, or spin, because nobody can be let in."""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable

PAUSE_SECONDS = 1.0
# There is no descriptor, or no memory, left for another connection: who waits is let in later.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """opens_at: the monotonic time from which `look` listens again; None while it listens, or is closed."""

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, call: Callable[[], None]
    ) -> None:
        """listener: one that never blocks. call: what the selector has as data for it."""
        self._listener, self._selector, self._call = listener, selector, call
        self.opens_at: float | None = None
        selector.register(listener, selectors.EVENT_READ, call)

    def accept(self) -> socket.socket | None:
        """Return who comes first, as a socket that never blocks; None if nobody can be let in now."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:
                self._selector.unregister(self._listener)
                self.opens_at = time.monotonic() + PAUSE_SECONDS
            return None  # else who came has gone
        connection.setblocking(False)
        return connection

    def look(self) -> None:
        """Listen again if it is time."""
        if self.opens_at is not None and time.monotonic() >= self.opens_at:
            self.opens_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._call)

    def close(self) -> None:
        """Listen no more."""
        self.opens_at = None
        with contextlib.suppress(KeyError):  # it waits for room
            self._selector.unregister(self._listener)
