"""Tells of an exception that ends the process, before the process is torn down, which may take seconds."""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class ExceptionHook:
    """Calls `report` once an exception has come out of the program and its traceback is written.

    The hook that was there before (sys.excepthook) writes the traceback. Not for exceptions of other threads,
    nor for those that somebody hands to the hook while the program goes on; SystemExit never comes here. With
    KeyboardInterrupt the process ends by SIGINT, which is for the agent to see.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report
        self._program = _bottom(sys._current_frames()[threading.main_thread().ident or 0])
        self._before = sys.excepthook
        self._own = self._hook
        sys.excepthook = self._own

    def remove(self) -> None:
        """Put the hook back that was there before; one that has come since stays, and ours is done."""
        self._report = lambda error: None
        if sys.excepthook is self._own:
            sys.excepthook = self._before

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if not self._ends_the_process() or isinstance(error, KeyboardInterrupt):
            return
        for stream in (sys.stdout, sys.stderr):
            # The agent may end the process from now on. What is closed or full now would be so at its end.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        self._report(error)

    def _ends_the_process(self) -> bool:
        """Return whether the program is over: its first frame is not on the stack of the main thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and _bottom(sys._getframe()) is not self._program


def _bottom(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
