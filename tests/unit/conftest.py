"""What unit tests leave behind in their process, which others run in after them, in any order."""

import importlib
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


@pytest.fixture
def nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of many loops: as each begins it looks at all objects of the process."""
    made_in_loop = importlib.import_module("jitckpt.data.made_in_loop")
    monkeypatch.setattr(made_in_loop, "watch", lambda: None)
    monkeypatch.setattr(made_in_loop, "_known", None)
