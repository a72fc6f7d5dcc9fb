"""What unit tests leave behind in their process, which others run in after them, in any order."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command that a test runs in this process takes signals as in its own, and does not give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
