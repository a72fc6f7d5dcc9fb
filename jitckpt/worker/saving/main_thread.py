"""Holds this process's main thread where it would go on with Python code.

A thread that waits in a call of the device may come back from there at any time, and one that works on the
host meets no gate. Python runs a pending call on its main thread before that goes on with Python code: ours
waits. So another thread may change for a while what the objects of the training say.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jitckpt.bindings import interpreter

# A thread that wants the GIL gets it every 5 ms, so by then it waits here, or is in no Python code.
COMES_SECONDS = 0.05


class _Hold:
    def __init__(self) -> None:
        self.came, self.over = threading.Event(), threading.Event()


_current: _Hold | None = None


def _wait() -> None:
    hold = _current
    if hold is not None:
        hold.came.set()
        hold.over.wait()


_pending_call = interpreter.pending_call(_wait)  # may be run much later: kept for good


@contextmanager
def held(thread: int) -> Iterator[threading.Event | None]:
    """Hold this thread (its get_ident()) until the `with` statement is left; for one caller at a time.

    Gives an event that is set once the thread waits here; while it is not, it is inside of a call that has
    given up the GIL. None: it is not the main thread, or Python takes no more calls, and nothing holds it.
    """
    global _current  # noqa: PLW0603
    if thread != threading.main_thread().ident:
        yield None
        return
    hold = _current = _Hold()
    try:
        if not interpreter.add_pending_call(_pending_call):
            yield None
            return
        until = time.monotonic() + COMES_SECONDS
        while not hold.came.is_set() and time.monotonic() < until:
            time.sleep(COMES_SECONDS / 10)
        yield hold.came
    finally:
        _current = None
        hold.over.set()
