"""How the program ends: by an exception, of which is told before the process is torn down, or by a status."""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn


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
        flush_output()
        self._report(error)

    def _ends_the_process(self) -> bool:
        """Return whether the program is over: its first frame is not on the stack of the main thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and _bottom(sys._getframe()) is not self._program


class ExitHook:
    """Remembers the status with which sys.exit was last called; 0 if it was not.

    Who raises SystemExit by hand isn't seen: only the process's own exit status tells then.
    """

    def __init__(self) -> None:
        self.status: object = 0
        self._before = sys.exit
        self._own = self._exit
        sys.exit = self._own

    def remove(self) -> None:
        """Put back what was there before; what has come since stays."""
        if sys.exit is self._own:
            sys.exit = self._before

    def _exit(self, status: Any = None, /) -> NoReturn:
        self.status = 0 if status is None else status
        self._before(status)


def flush_output() -> None:
    """Flush what the program has printed: the agent may end the process from now on."""
    for stream in (sys.stdout, sys.stderr):
        # What is closed or full now would be so at its end.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _bottom(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
