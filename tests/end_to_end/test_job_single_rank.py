"""One protected rank on softgpu, with the test in the agent's place: it orders saves, restarts, resumes."""

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import SERVERS

from jitckpt import device
from jitckpt.ring import local_state
from jitckpt.saves import folders, layout
from jitckpt.system import descriptors
from jitckpt.wire import protocol
from jitckpt.wire.protocol import WorkerMessage

TRAINING = Path(__file__).parent / "training.py"
LIMIT = 120.0  # seconds for anything


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("JITCKPT_")}
    variables = device.device_environment("softgpu", 1, device.LIBRARY_DIR, own)
    return own | variables | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Worker:
    """A training with an agent's socket and memory, or without."""

    def __init__(self, *, agent: bool = True, program: str | Path = TRAINING, **options: Any) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(LIMIT)
        self.ring = local_state.create()
        numbers = {descriptors.AGENT: theirs.fileno(), descriptors.STATE: self.ring}
        agents = {name: str(number) for name, number in numbers.items()}
        agents[descriptors.PROOF] = descriptors.proof(0, numbers)
        self.process = SERVERS.start_worker(
            [sys.executable, str(program), json.dumps(options)],
            environment() | (agents if agent else {}),
            (theirs.fileno(), self.ring) if agent else (),
        )
        theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.socket.close()
        os.close(self.ring)

    def wait_for(self, *kinds: type[WorkerMessage]) -> Any:
        """Return the next message of one of these kinds; other kinds are passed over."""
        while True:
            data = self.socket.recv(protocol.MAX_BYTES)
            if not data:
                pytest.fail(f"The worker ended:\n{self.process.communicate()[1]}")
            message = protocol.decode(data)
            if isinstance(message, kinds):
                return message

    def order_save(self, save_id: int = 1) -> Any:
        """Order a save; return how it ended."""
        self.socket.send(protocol.encode(protocol.Save(save_id, reason="a test", deadline=60.0)))
        return self.wait_for(protocol.SaveEnded, protocol.SaveFailed)

    def resume(self) -> None:
        self.socket.send(protocol.encode(protocol.Resume()))

    def result(self) -> dict[str, Any]:
        """Return what the training ended with."""
        out, errors = self.process.communicate(timeout=LIMIT)
        assert self.process.returncode == 0, errors
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


def wait_until(condition: Callable[[], bool], worker: Worker) -> None:
    until = time.monotonic() + LIMIT
    while not condition():
        assert worker.process.poll() is None, worker.process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)


def without_start(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "start"}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {},
    "one micro-batch": {"micro_batches": 1},
    "batch normalisation": {"model": "convnet"},
    "gradient scaler": {"scaler": True},
    "two optimizers": {"optimizers": 2},
    "constant rate": {"constant_rate": True},
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, Any]]:
    """The results of trainings in which nothing failed, as they are asked for."""
    return {}


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> None:
    random.seed(request.node.name)


def expected(cache: dict[str, dict[str, Any]], name: str, folder: Path) -> dict[str, Any]:
    if name not in cache:
        with Worker(directory=str(folder / "undisturbed"), **CONFIGURATIONS[name]) as worker:
            cache[name] = worker.result()
    return cache[name]


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_save_at_any_moment_restores_bit_for_bit(
    name: str, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    options = CONFIGURATIONS[name] | {"directory": str(tmp_path / "c")}
    with Worker(pause=0.005, **options) as worker:
        worker.wait_for(protocol.FirstStep)
        time.sleep(random.random() * 0.3)
        ended = worker.order_save()
        assert isinstance(ended, protocol.SaveEnded), ended
        assert ended.step > 0
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        local_state.write_save(worker.ring, tmp_path / "c", ended.step)
    assert [folders.verify(record) for record in folders.find(tmp_path / "c")] == [None, None]
    with Worker(**options) as worker:
        restored = worker.wait_for(protocol.Restored)
        assert (restored.step, restored.path) == (ended.step, ended.path)
        assert worker.wait_for(protocol.FirstStep).step == ended.step + 1
        assert worker.wait_for(protocol.Finished).step == 60
        result = worker.result()
    assert result["start"] == ended.step
    assert without_start(result) == without_start(expected(undisturbed, name, tmp_path))


@pytest.mark.parametrize("name", ["accumulation and clipping", "gradient scaler", "two optimizers"])
@pytest.mark.parametrize("step", [20, 27])  # 27 is one that the scaler skips
def test_what_was_still_due_after_the_optimizer_step_is_done_at_the_restore(
    name: str, step: int, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    options = CONFIGURATIONS[name] | {"directory": str(tmp_path / "c")}
    with Worker(**options, wait_in_step=step) as worker:
        wait_until((tmp_path / "c" / "waiting").exists, worker)
        ended = worker.order_save()
        assert isinstance(ended, protocol.SaveEnded), ended
        assert ended.step == step
    document = json.loads((Path(ended.path) / layout.STATE_FILE).read_bytes())
    assert set(document["scheduler_steps_due"]) == {1}
    with Worker(**options) as worker:
        result = worker.result()
    assert result["start"] == step
    assert without_start(result) == without_start(expected(undisturbed, name, tmp_path))


@pytest.mark.parametrize(
    ("asleep", "name"), [("data", "accumulation and clipping"), ("evaluation", "gradient scaler")]
)
def test_a_save_does_not_wait_for_a_thread_that_works_on_the_host_alone(
    asleep: str, name: str, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    """Neither it nor the training that goes on from the save is changed by that."""
    folder = tmp_path / "c"
    options = CONFIGURATIONS[name] | {"directory": str(folder)}
    with Worker(**options, wait_in_step=20, asleep=asleep) as worker:
        wait_until((folder / "waiting").exists, worker)
        ended = worker.order_save()
        assert isinstance(ended, protocol.SaveEnded), ended
        assert ended.step == 20
        (folder / "go").touch()
        worker.resume()
        worker.wait_for(protocol.Finished)
        assert worker.result() == expected(undisturbed, name, tmp_path)
    assert [folders.verify(record) for record in folders.find(folder)] == [None]
    with Worker(**options) as worker:
        result = worker.result()
    assert result["start"] == 20
    assert without_start(result) == without_start(expected(undisturbed, name, tmp_path))


@pytest.mark.usefixtures("seed")
def test_after_a_false_alarm_the_training_goes_on_undisturbed(
    tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    name = "accumulation and clipping"
    steps = []
    with Worker(directory=str(tmp_path / "c"), pause=0.005) as worker:
        worker.wait_for(protocol.FirstStep)
        for save_id in range(1, 4):
            time.sleep(random.random() * 0.1)
            ended = worker.order_save(save_id)
            assert isinstance(ended, protocol.SaveEnded), ended
            steps.append(ended.step)
            worker.resume()
        worker.wait_for(protocol.Finished)
        result = worker.result()
    assert steps == sorted(steps)
    assert result == expected(undisturbed, name, tmp_path)
    kept = {record.step for record in folders.find(tmp_path / "c")}
    assert max(steps) in kept
    assert len(kept) <= 2


def test_before_the_first_step_there_is_nothing_to_save_and_it_says_so(tmp_path: Path) -> None:
    with Worker(directory=str(tmp_path), pause=30.0, wait_at_start=True) as worker:
        worker.wait_for(protocol.Registered)
        failed = worker.order_save()
    assert isinstance(failed, protocol.SaveFailed)
    assert failed.reason.startswith("No minibatch is finished yet")
    assert folders.find(tmp_path) == []


def test_a_fresh_start_has_nothing_of_what_an_earlier_try_left(tmp_path: Path) -> None:
    """Nobody had saved a step, so what this rank alone knew of its first ones is not of this try."""
    with Worker(directory=str(tmp_path), pause=0.02) as worker:
        step = worker.wait_for(protocol.FirstStep).step
        worker.process.kill()
        worker.process.wait()
        local_state.write_save(worker.ring, tmp_path, step)
    assert [record.kind for record in folders.find(tmp_path)] == ["local"]
    with Worker(directory=str(tmp_path), pause=0.02) as worker:
        assert worker.wait_for(protocol.FirstStep).step == 1
        assert folders.find(tmp_path) == []


def test_a_save_before_a_new_step_names_the_save_that_was_restored(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directory": str(tmp_path), "steps": 30}
    with Worker(**options, pause=0.005) as worker:
        worker.wait_for(protocol.FirstStep)
        first = worker.order_save()
    before = {path: path.stat().st_mtime_ns for path in Path(first.path).iterdir()}
    with Worker(**options, wait_at_start=True) as worker:
        worker.wait_for(protocol.Restored)
        again = worker.order_save()
    assert (again.step, again.path) == (first.step, first.path)
    assert before == {path: path.stat().st_mtime_ns for path in Path(first.path).iterdir()}


@pytest.mark.usefixtures("seed")
def test_a_save_function_of_the_users_own(tmp_path: Path, undisturbed: dict[str, dict[str, Any]]) -> None:
    name = "batch normalisation"
    options = CONFIGURATIONS[name] | {"directory": str(tmp_path / "c"), "callback": "save"}
    with Worker(pause=0.005, **options) as worker:
        worker.wait_for(protocol.FirstStep)
        time.sleep(random.random() * 0.3)
        ended = worker.order_save()
        assert isinstance(ended, protocol.SaveEnded), ended
    folder = Path(ended.path)
    assert (folder / "step").read_text() == str(ended.step)
    (record,) = folders.find(tmp_path / "c")
    assert record.metadata is not None
    assert {file.name for file in record.metadata.files} >= {"mine.pt", "step"}
    assert folders.verify(record) is None
    with Worker(**options) as worker:
        result = worker.result()
    assert result["start"] == ended.step
    assert without_start(result) == without_start(expected(undisturbed, name, tmp_path))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raise", "The save function raised ValueError('the save function does not want to')"),
        ("exit", "The save function raised SystemExit(3)"),
    ],
)
def test_a_save_function_that_fails_keeps_its_traceback(tmp_path: Path, what: str, reason: str) -> None:
    with Worker(directory=str(tmp_path), callback=what, pause=0.01) as worker:
        worker.wait_for(protocol.FirstStep)
        begun = None
        worker.socket.send(protocol.encode(protocol.Save(7, reason="a test", deadline=60.0)))
        begun = worker.wait_for(protocol.SaveBegun)
        failed = worker.wait_for(protocol.SaveFailed)
        worker.resume()
        worker.wait_for(protocol.Finished)
        worker.result()
    assert failed.save_id == 7
    assert failed.reason.startswith(reason)
    assert "in save" in failed.traceback
    kept = tmp_path / layout.step_folder(begun.step) / "error-rank-00000.txt"
    assert kept.read_text() == failed.traceback
    assert folders.find(tmp_path) == []


def test_a_collective_in_the_save_function_is_refused_by_name(tmp_path: Path) -> None:
    with Worker(directory=str(tmp_path / "c"), callback="collective", pause=0.01) as worker:
        worker.wait_for(protocol.FirstStep)
        failed = worker.order_save()
    assert isinstance(failed, protocol.SaveFailed)
    assert "ncclAllReduce" in failed.reason + failed.traceback
    assert "all_reduce" in failed.traceback


def test_a_full_disk_at_save_time_loses_no_earlier_save(tmp_path: Path) -> None:
    with Worker(directory=str(tmp_path), pause=0.01) as worker:
        worker.wait_for(protocol.FirstStep)
        first = worker.order_save()
    with Worker(directory=str(tmp_path), pause=0.01, largest_file=3000) as worker:
        worker.wait_for(protocol.FirstStep)
        failed = worker.order_save()
    assert isinstance(failed, protocol.SaveFailed)
    assert "tensors.safetensors can't be written or read: File too large" in failed.reason
    (record,) = folders.find(tmp_path)
    assert record.step == first.step
    assert folders.verify(record) is None


def test_the_death_of_the_agent_saves_and_ends_the_process(tmp_path: Path) -> None:
    with Worker(directory=str(tmp_path / "c"), pause=0.02) as worker:
        worker.wait_for(protocol.FirstStep)
        worker.socket.close()
        errors = worker.process.communicate(timeout=LIMIT)[1]
        assert worker.process.returncode == 75, errors
    found = folders.find(tmp_path / "c")
    assert {record.kind for record in found} == {"rank", "local"}
    assert {folders.verify(record) for record in found} == {None}
    events = (tmp_path / "c" / layout.EVENTS_FILE).read_text()
    assert '"event": "save_ended"' in events


@pytest.mark.usefixtures("seed")
def test_a_save_function_and_nothing_else(tmp_path: Path, undisturbed: dict[str, dict[str, Any]]) -> None:
    name = "constant rate"
    options = CONFIGURATIONS[name] | {"directory": str(tmp_path / "c"), "callback": "save", "bare": True}
    with Worker(pause=0.005, **options) as worker:
        worker.wait_for(protocol.FirstStep)
        time.sleep(random.random() * 0.3)
        ended = worker.order_save()
        assert isinstance(ended, protocol.SaveEnded), ended
    with Worker(**options) as worker:
        result = worker.result()
    assert result["start"] == ended.step
    assert without_start(result) == without_start(expected(undisturbed, name, tmp_path))


@pytest.mark.usefixtures("seed")
def test_without_an_agent_sigterm_saves(tmp_path: Path, undisturbed: dict[str, dict[str, Any]]) -> None:
    name = "accumulation and clipping"
    options = {"directory": str(tmp_path / "c")}
    with Worker(agent=False, pause=0.02, **options) as worker:
        events = tmp_path / "c" / layout.EVENTS_FILE
        wait_until(lambda: events.exists() and "first_step" in events.read_text(), worker)
        worker.process.send_signal(signal.SIGTERM)
        errors = worker.process.communicate(timeout=LIMIT)[1]
        assert worker.process.returncode == -signal.SIGTERM, errors
    kinds = {(record.kind, record.rank) for record in folders.find(tmp_path / "c")}
    assert kinds == {("rank", 0), ("local", 0)}
    with Worker(agent=False, **options) as worker:
        result = worker.result()
    assert result["start"] > 0
    assert without_start(result) == without_start(expected(undisturbed, name, tmp_path))
    text = events.read_text()
    for event in ("registered", "save_begun", "save_ended", "restored", "first_step", "finished"):
        assert f'"event": "{event}"' in text
