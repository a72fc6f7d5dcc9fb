"""Calls that may never return, such as those to a store whose process is stopped: given up after a while."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

LOOK_SECONDS = 1.0
PIECES = 10  # of a time that is waited for
THREAD_NAME = "jitckpt-store"
HEARTBEATS_NAME = "RendezvousKeepAliveTimer"  # torch's, with a number

Value = TypeVar("Value")


def within(seconds: float, call: Callable[[], Value]) -> Value:
    """Return what the call returns; raise TimeoutError if it does not in time, and forget it.

    The time is waited for in pieces: one in which this whole process was held up counts as one.
    """
    pieces = iter(range(1, PIECES))

    def count() -> None:
        if next(pieces, None) is None:
            raise TimeoutError(f"no answer within {seconds:g} s")

    return watched(call, count, seconds / PIECES)()


def watched(
    call: Callable[[], Value], look: Callable[[], None], pause: float | None = None
) -> Callable[[], Value]:
    """Wait for a call; return what returns its value, or raises its error.

    look: called after each pause (default: LOOK_SECONDS) without an answer; once it raises, the call is
    forgotten.
    """
    answers: queue.SimpleQueue[Callable[[], Value]] = queue.SimpleQueue()
    _in_thread(call, answers)
    while True:
        try:
            return answers.get(timeout=LOOK_SECONDS if pause is None else pause)
        except queue.Empty:
            look()


def _in_thread(call: Callable[[], Value], answers: "queue.SimpleQueue[Callable[[], Value]]") -> None:
    def answer() -> None:
        try:
            value = call()
        except BaseException as error:  # it is raised where the answer is waited for
            answers.put(_raising(error))
        else:
            answers.put(lambda: value)

    threading.Thread(target=answer, name=THREAD_NAME, daemon=True).start()


def _raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def has_calls_out() -> bool:
    """Return whether any thread of this process may be in a call to a store.

    A call that returns while the interpreter ends aborts the process, and nobody can make it return before.
    """
    names = (thread.name for thread in threading.enumerate())
    return any(name.startswith((THREAD_NAME, HEARTBEATS_NAME)) for name in names)
