"""What fails in jitckpt's hooks fails jitckpt alone; what is then not saved is told."""

import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from jitckpt.worker.around_steps import AroundSteps
from jitckpt.worker.switch import Switch, harmless


class Guarded:
    """Has one harmless method, which calls what it is given."""

    def __init__(self, hook: Callable[[], None]) -> None:
        self.switch = Switch(lambda: 0, lambda step: None, lambda text: None)
        self._hook = hook

    @harmless
    def call(self) -> None:
        self._hook()


def test_without_protection_the_steps_that_a_failure_costs_are_told_on() -> None:
    begun, warned = list[int](), list[str]()
    switch = Switch(lambda: 0, begun.append, warned.append)
    steps: Any = AroundSteps.__new__(AroundSteps)
    steps.switch, steps._lookouts, steps._own = switch, Mock(), Mock()
    steps._own.forward_ended.side_effect = ValueError("a hook has failed")
    for step in (1, 2, 3):
        steps.forward_ended(step)
    steps.unequal_turns(4)
    steps.forward_ended(4)
    assert begun == [1, 2, 3, 5]
    assert len(warned) == 1
    assert "from step 1 on: a hook has failed The training goes on" in warned[0]


def test_what_a_signal_s_handler_raises_in_a_hook_is_the_training_s() -> None:
    def handler(signum: int, frame: object) -> None:
        raise RuntimeError("a loader's worker was killed")

    made = []

    def hook() -> None:
        made.append(1)
        if len(made) == 1:
            signal.raise_signal(signal.SIGUSR1)

    job = Guarded(hook)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="a loader's worker was killed"):
            job.call()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert job.switch.off is None
    job.call()
    assert "a loader's worker was killed" in (job.switch.off or "")
    assert len(made) == 1  # it was left in the middle, so what it would take now is no state of the training


def test_what_fails_in_a_hook_is_not_raised() -> None:
    def hook() -> None:
        raise ValueError("in jitckpt")

    job = Guarded(hook)
    job.call()
    assert job.switch.off == "in jitckpt"
