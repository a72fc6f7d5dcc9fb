from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    # A process that was sent SIGKILL takes its time to go.
    launcher.wait_until(lambda: launcher.survivors() == [])
