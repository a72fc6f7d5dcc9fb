"""A test leaves its process as it found it: the next one may be any other, in any order."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Take back what was done to this process; commands that a test runs here take it for their own."""
    variables, folder, collects = dict(os.environ), os.getcwd(), gc.isenabled()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(folder)
    (gc.enable if collects else gc.disable)()
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
