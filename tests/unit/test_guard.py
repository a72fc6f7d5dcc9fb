"""Hooks that fail harm nothing but what they are for."""

import signal

import pytest

from jitckpt.errors import RecoveryError
from jitckpt.hooks.guard import Guard, in_words


class Hooks:
    """Two hooks, which raise what they are to raise, and who hears of that."""

    def __init__(self, *raised: Exception) -> None:
        self.raised, self.calls = list(raised), 0
        self.failed: list[Exception] = []
        guard = Guard(self.failed.append)
        self.one, self.other = guard(self._hook), guard(self._hook)

    def _hook(self, value: int) -> int:
        self.calls += 1
        if self.raised:
            raise self.raised.pop()
        return value


def test_none_of_them_does_anything_once_one_has_failed() -> None:
    error = TypeError("as a test")
    hooks = Hooks(error)
    assert hooks.one(1) is None
    assert hooks.one(2) is hooks.other(3) is None
    assert (hooks.calls, hooks.failed) == (1, [error])
    assert Hooks().one(4) == 4


def test_a_result_that_may_be_wrong_ends_the_training() -> None:
    hooks = Hooks(RecoveryError("The result may differ."))
    with pytest.raises(RecoveryError):
        hooks.one(1)
    assert hooks.failed == []


def test_what_a_signals_handler_raises_is_the_programs() -> None:
    """As torch's handler does, where a loader's worker has died."""

    def handler(number: int, _: object) -> None:
        raise RuntimeError(f"got signal {number}")

    failed: list[Exception] = []
    hook = Guard(failed.append)(lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="got signal"):
            hook()
        assert failed == []
        assert hook() is None  # the program has gone on, and this hook was left in the middle
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [str(error) for error in failed] == [f"got signal {signal.SIGUSR1:d}"]


def test_words_say_where_it_was() -> None:
    hooks = Hooks(ValueError("as a test"))
    hooks.one(1)
    (error,) = hooks.failed
    assert in_words(error).startswith(f"ValueError: as a test, {__file__}, line ")
