"""What fails in a hook fails jitckpt alone: the training, in which nothing has failed, goes on without it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from jitckpt.errors import RecoveryError
from jitckpt.system.signals import comes_from_signal


class Guard:
    """Of hooks that belong together: once one of them has failed, none does anything any more.

    Two kinds of exceptions go through: a RecoveryError, as a result that may be wrong is worse than none, and
    what a signal's handler raises meanwhile (torch's, when a loader's worker has died), which is the
    program's. Should that go on, the hook was left in the middle: that counts as its failure.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """failed: called once, where a hook has failed."""
        self._failed = failed
        self._is_over = False
        self._interrupted: Exception | None = None

    def __call__(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook, which returns None where it fails."""

        @wraps(hook)
        def guarded(*arguments: Any, **named: Any) -> Any:
            if self._interrupted is not None and not self._is_over:
                self._end(self._interrupted)
            if self._is_over:
                return None
            try:
                return hook(*arguments, **named)
            except RecoveryError:
                raise
            except Exception as error:
                if comes_from_signal(error):
                    self._interrupted = error
                    raise
                self._end(error)
            return None

        return guarded

    def _end(self, error: Exception) -> None:
        self._is_over = True
        self._failed(error)


def in_words(error: Exception) -> str:
    """Return what has failed in a hook, and in which line of whose code."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f", {place.tb_frame.f_code.co_filename}, line {place.tb_lineno}"
    return f"{type(error).__name__}: {error}{where}"
