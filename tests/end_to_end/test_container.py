"""`jitckpt run` as a container's first process: any user, no home, nothing to write to, a tiny /dev/shm."""

import signal
import subprocess
from pathlib import Path

import pytest
from gpt import RUN, TRAINING, digests
from launcher import Launcher
from programs_of_tests import text_of

from jitckpt.events import read_events

NAMESPACES = "--user --map-user=54321 --map-group=54321 --keep-caps --mount --pid --fork --kill-child --ipc"
CONTAINER = ["unshare", *NAMESPACES.split(), str(Path(__file__).with_name("container.sh"))]

# What a rank tells of the container, before it trains; it leaves an orphan behind, which dies.
LOOK = text_of("container_look")


@pytest.fixture
def container(launcher: Launcher) -> list[str]:
    """Return what a command in a container begins with."""
    command = [*CONTAINER, str(launcher.directory)]
    done = subprocess.run([*command, "true"], check=False, capture_output=True, text=True)
    if "Operation not permitted" in done.stderr:  # anything else is a failure
        pytest.skip(f"name spaces can't be made here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return command


def test_a_training_in_a_container_comes_back_bit_for_bit(
    container: list[str], launcher: Launcher, undisturbed: list[str]
) -> None:
    directory = launcher.directory / "checkpoints"
    fault = ["--fault", "rank=1 step=3 phase=backward kind=kill"]
    saves = ["--checkpoint-dir", str(directory)]
    result = launcher.run(*container, *RUN, *fault, launcher.script(LOOK), *TRAINING, *saves)
    assert result.status == 0, result.err
    assert digests(result.out) == undisturbed
    assert "seen 54321 unknown None True" in result.err
    assert "root Read-only file system | tmp Read-only file system" in result.err
    assert "capabilities 0 65536" in result.err
    assert "zombies of process 1: 0" in result.err
    assert "saved" in [event["event"] for event in read_events(directory)[0]]


def test_a_container_that_is_stopped_saves(container: list[str], launcher: Launcher) -> None:
    """SIGTERM to process 1, which has no handler of the system's: Kubernetes' preemption."""
    directory = launcher.directory / "checkpoints"
    saves = ["--checkpoint-dir", str(directory)]
    started = launcher.start(*container, *RUN, *TRAINING, *saves, "--steps", "100000")

    def trains() -> bool:
        return (directory / "events.jsonl").exists() and "first_step" in {
            event["event"] for event in read_events(directory)[0]
        }

    launcher.wait_until(trains)
    first = subprocess.run(
        ["pgrep", "--parent", str(started.pid)], check=True, capture_output=True, text=True
    ).stdout
    subprocess.run(["kill", f"-{int(signal.SIGTERM)}", first.strip()], check=True)
    result = launcher.finish(started)
    assert result.status == 75, result.err
    assert list(launcher.directory.glob("*/step-*/rank-*/metadata.json"))
