import faulthandler
import os
import random
import sys
import time

import pytest
from hypothesis import settings

# A slow machine is no failure; with CI set, hypothesis takes the same examples every time by itself.
settings.register_profile("jitckpt", settings(), deadline=None)
settings.load_profile("jitckpt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="leave out the tests that have not begun by then (seconds since 1970); files come in any order",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Where time may be short a hang ends nine minutes after it, with the place, in each xdist process."""
    until = config.getoption("--until")
    if until is not None:
        # Of its own: pytest captures the usual one while tests run.
        stderr = os.dup(sys.__stderr__.fileno())
        faulthandler.dump_traceback_later(max(until + 540 - time.time(), 60), exit=True, file=stderr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where time may be short let it be other files' turn each time; in all of xdist's processes the same."""
    until = config.getoption("--until")
    if until is not None:
        files = sorted({item.path for item in items})
        random.Random(until).shuffle(files)
        items.sort(key=lambda item: files.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("time is up")
