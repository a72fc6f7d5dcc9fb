from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import SERVERS
from gpt import RUN, TRAINING, digests
from launcher import Launcher
from namespaces import Namespaces, namespaces
from snapshot_job import in_memory, undisturbed_training


def pytest_unconfigure() -> None:
    SERVERS.close()


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


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the small training ends with if nothing fails."""
    out = Launcher(tmp_path_factory.mktemp("undisturbed")).succeed(*RUN, *TRAINING)
    return digests(out)


@pytest.fixture
def four_hosts() -> Iterator[Namespaces]:
    with namespaces(4) as found:
        yield found


@pytest.fixture(scope="session")
def undisturbed_job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the training of snapshot_job.py ends with if nothing fails."""
    return undisturbed_training(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def disks(launcher: Launcher) -> Iterator[Path]:
    """Give where the hosts' directories are."""
    with in_memory(launcher.directory / "disks") as folder:
        yield folder
