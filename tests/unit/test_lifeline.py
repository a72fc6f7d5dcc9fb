"""What the agent hears of real processes that end."""

import os
import select
import signal
from collections.abc import Callable, Iterator

import pytest

from jitckpt.system.lifeline import Lifeline, hold

PLENTY = 120.0


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    made = Lifeline()
    yield made
    made.close()


def is_released(lifeline: Lifeline, within: float = 0.0) -> bool:
    return bool(select.select([lifeline.released], [], [], within)[0])


def child_that_holds(lifeline: Lifeline, then: Callable[[], object]) -> int:
    """Return the process id of a child that holds the lifeline."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        hold(lifeline.descriptor)
        os.write(tell, b"x")
        then()
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return pid


def test_a_killed_process_lets_go(lifeline: Lifeline) -> None:
    pid = child_that_holds(lifeline, signal.pause)
    lifeline.watch()
    assert not is_released(lifeline)
    os.kill(pid, signal.SIGKILL)
    assert is_released(lifeline, within=PLENTY)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_a_process_that_has_ended_before_the_watch_is_not_missed(lifeline: Lifeline) -> None:
    os.waitpid(child_that_holds(lifeline, lambda: None), 0)
    lifeline.watch()
    assert is_released(lifeline, within=PLENTY)


def test_what_a_process_has_forked_holds_nothing(lifeline: Lifeline) -> None:
    def fork_one_that_ends() -> None:
        hold(lifeline.descriptor)  # twice is no harm
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        os.write(told, b"x")
        signal.pause()

    heard, told = os.pipe()
    pid = child_that_holds(lifeline, fork_one_that_ends)
    lifeline.watch()
    os.read(heard, 1)
    assert not is_released(lifeline)
    os.kill(pid, signal.SIGKILL)
    assert is_released(lifeline, within=PLENTY)
    os.waitpid(pid, 0)
    os.close(heard)
    os.close(told)
