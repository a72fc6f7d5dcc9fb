"""Work that may have to wait for a file system, done beside a thread that must not."""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Work = Callable[[], None]
T = TypeVar("T")


class DiskThread:
    """Does what it is given, one after the other, on a thread that a blocked disk blocks alone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given = threading.Lock()
        self._done = threading.Condition()
        self._open = 0  # given and not done

    def do(self, work: Work) -> None:
        """Have something done; it must raise nothing."""
        with self._given:
            with self._done:
                self._open += 1
            self._work.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def finish(self, within: float) -> bool:
        """Wait until all is done; return whether it is, after so many seconds at most."""
        until = time.monotonic() + within
        with self._done:
            return self._done.wait_for(lambda: self._open == 0, max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            finally:
                with self._done:
                    self._open -= 1
                    self._done.notify_all()


def waited_for(call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises; signals are heard meanwhile."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jitckpt-disk", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
