"""What is asked of a control thread from elsewhere: to end, to take in hosts; and what wakes it."""

import os
import time
from collections.abc import Callable

SAME_REQUEST_SECONDS = 1.0  # wrappers (uv run, srun) pass on a signal that the agent gets by itself, too


class Requests:
    """Has a descriptor that can be waited for (`fileno`) until `close`."""

    wants_in = ""  # who waits to be taken in, in words

    def __init__(self, is_over: Callable[[], bool]) -> None:
        """is_over: whether the control thread hears nothing any more."""
        self.interrupts: list[int] = []  # signals
        self._is_over = is_over
        self._patient_until = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def interrupt(self, signum: int) -> None:
        """Take note of a signal that asks the agent to end; the second time nothing is waited for.

        May be called by a signal handler.
        """
        now = time.monotonic()
        if self.interrupts and now < self._patient_until:
            return
        self._patient_until = now + SAME_REQUEST_SECONDS
        self.ask_to_end(signum)

    def ask_to_end(self, *signals: int) -> None:
        self.interrupts += signals
        if not self._is_over():
            self.wake()

    def take_in(self, who: str) -> None:
        """Have all ranks saved, to start again with the hosts that wait: `who`, a clause. From any thread."""
        self.wants_in = who
        if not self._is_over():
            self.wake()

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def woken(self) -> None:
        """The descriptor was ready: let the next one wake the thread anew."""
        os.eventfd_read(self._wake)

    def close(self) -> None:
        os.close(self._wake)
