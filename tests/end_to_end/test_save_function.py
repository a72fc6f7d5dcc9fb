"""A save function of the user's own, called while the host is minibatches ahead of its device."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from test_job_single_rank import Worker, wait_until

from jitckpt.ring import local_state
from jitckpt.saves import layout
from jitckpt.wire import protocol

AHEAD = Path(__file__).parent / "ahead.py"
BLOCKED = 12
BARE: dict[str, Any] = {"given": []}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "all given": {},
    "two optimizers": {"optimizers": 2},
    "gradient scaler": {"scaler": True, "ahead": 0},
    "nothing given": BARE,
    "nothing given, two optimizers": BARE | {"optimizers": 2},
    "nothing given, gradient scaler": BARE | {"scaler": True, "ahead": 0},
    "no scheduler given": {"given": ["model", "optimizer"]},
    "no scheduler at all": {"given": ["optimizer"], "schedulers": False},
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, Any]]:
    """What trainings end with in which nothing is saved, as they are asked for."""
    return {}


def final(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("start", "restored", "said")}


def expected(cache: dict[str, dict[str, Any]], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    key = json.dumps([options.get(name) for name in ("optimizers", "scaler", "schedulers")])
    if key not in cache:
        with Worker(program=AHEAD, directory=str(folder / "undisturbed"), **options) as worker:
            cache[key] = worker.result()
    return final(cache[key])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_reads_the_step_that_the_device_has_ended(
    name: str, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    """A restart from what it wrote ends as the undisturbed run; so does the training, if it goes on."""
    folder = tmp_path / "c"
    options = CONFIGURATIONS[name] | {"directory": str(folder)}
    with Worker(program=AHEAD, blocked=BLOCKED, **options) as worker:
        wait_until((folder / "waiting").exists, worker)
        ended = worker.order_save()
        assert isinstance(ended, protocol.SaveEnded), ended
        assert ended.step == BLOCKED
        local_state.write_save(worker.ring, folder, BLOCKED)
        (folder / "go").touch()
        worker.resume()
        worker.wait_for(protocol.Finished)
        result = worker.result()
    assert result["said"] == [f"saved {BLOCKED}"]
    assert final(result) == expected(undisturbed, CONFIGURATIONS[name], tmp_path)
    with Worker(program=AHEAD, **options) as worker:
        result = worker.result()
    assert result["start"] == BLOCKED
    skipped = BLOCKED // 7 if "scaler" in options else 0
    assert result["restored"]["steps"] == [BLOCKED - skipped]
    assert final(result) == expected(undisturbed, CONFIGURATIONS[name], tmp_path)


@pytest.mark.parametrize("given", [["model", "optimizer", "scheduler"], []])
def test_a_training_thread_that_works_on_the_host_is_held(
    given: list[str], tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    """It would see its optimizer as it was steps before."""
    options: dict[str, Any] = {"directory": str(tmp_path / "c"), "given": given}
    with Worker(program=AHEAD, blocked=BLOCKED, works_on_host=True, **options) as worker:
        wait_until((tmp_path / "c" / "waiting").exists, worker)
        for save_id in (1, 2, 3):
            ended = worker.order_save(save_id)
            assert isinstance(ended, protocol.SaveEnded), ended
            assert ended.step == BLOCKED
        (tmp_path / "c" / "go").touch()
        worker.resume()
        result = worker.result()
    assert final(result) == expected(undisturbed, {}, tmp_path)


def test_optimizers_that_were_not_given_and_take_unequal_turns_are_refused(tmp_path: Path) -> None:
    options = BARE | {"optimizers": 2, "several_steps": True, "directory": str(tmp_path / "c")}
    with Worker(program=AHEAD, blocked=BLOCKED, **options) as worker:
        wait_until((tmp_path / "c" / "waiting").exists, worker)
        failed = worker.order_save()
    assert isinstance(failed, protocol.SaveFailed)
    assert "NAdam with 2 parameters made one that was not expected" in failed.reason
    assert "Give them to jitckpt.init (optimizer=[...])" in failed.reason


def test_without_an_agent_sigterm_saves_what_the_device_has_ended(
    tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    folder = tmp_path / "c"
    options = BARE | {"directory": str(folder)}
    with Worker(program=AHEAD, agent=False, blocked=BLOCKED, **options) as worker:
        wait_until((folder / "waiting").exists, worker)
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: '"save_ended"' in (folder / layout.EVENTS_FILE).read_text(), worker)
        (folder / "go").touch()
        worker.process.communicate()
    with Worker(program=AHEAD, agent=False, **options) as worker:
        result = worker.result()
    assert (result["start"], result["restored"]["steps"]) == (BLOCKED, [BLOCKED])
    assert final(result) == expected(undisturbed, BARE, tmp_path)
