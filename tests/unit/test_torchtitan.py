"""What is said of a torchtitan training, and what is done in the place of its load, by a stand-in for it."""

import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from jitckpt.frameworks import protection, torchtitan

CALLED = "loaded by torchtitan"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is said of trainings; here is the first one."""
    found: list[str] = []
    monkeypatch.setattr(protection, "_taken", "")
    monkeypatch.setattr(protection, "_say_first", found.append)
    monkeypatch.setattr(protection, "agree", lambda one: [one])
    monkeypatch.setattr(torchtitan, "version", lambda _: "0.0")
    return found


class Validator:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def should_validate(self, step: int) -> bool:
        return True

    def validate(self, parts: list[nn.Module], step: int) -> None:
        self.calls.append(("validate", step))


class Loss:
    def no_rescale(self) -> "Loss":
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class CheckpointManager:
    enable = True

    def __init__(self, states: dict[str, Any]) -> None:
        self.calls: list[Any] = []

    def load(self, step: int = -1) -> Any:
        self.calls.append("load")
        return CALLED

    def save(self, step: int, last_step: bool = False) -> None:
        self.calls.append(("save", step, last_step))

    def _find_load_step(self) -> int:
        return 9


def trainer(**changes: Any) -> Any:
    settings = SimpleNamespace(
        training=SimpleNamespace(enable_cpu_offload=False, steps=7), validation=SimpleNamespace(enable=True)
    )
    made: Any = SimpleNamespace(
        train_step=None,
        should_continue_training=lambda: made.step < 7,
        model_parts=[nn.Linear(1, 1)],
        optimizers=[],
        lr_schedulers=[],
        dataloader=[1, 2, 3],
        step=0,
        ntokens_seen=0,
        job_config=settings,
        loss_fn=Loss(),
    )
    vars(made).update(changes)
    return made


_numbers = itertools.count()


def load(made: Any) -> tuple[Any, CheckpointManager]:
    """Build a manager for a Trainer, and have it load as the Trainer does; return the result as well."""
    module = ModuleType(f"torchtitan.of.{next(_numbers)}")  # each is installed once
    module.CheckpointManager = type("CheckpointManager", (CheckpointManager,), {})  # type: ignore[attr-defined]
    torchtitan.install(module)
    made.checkpointer = module.CheckpointManager(states={"train_state": made})
    made.validator = Validator(made.checkpointer.calls)
    return made.checkpointer.load(step=-1), made.checkpointer


class OptimizersInBackwardContainer(list[Any]):
    pass


def offloaded() -> Any:
    made = trainer()
    made.job_config.training.enable_cpu_offload = True
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SimpleNamespace(step=0), "its Trainer has no train_step: versions 0.2 and 0.3 have."),
        (lambda: trainer(ft_manager=SimpleNamespace(enabled=True)), "torchft is on"),
        (lambda: trainer(optimizers=OptimizersInBackwardContainer()), "it makes its optimizer steps within"),
        (offloaded, "its parameters are on the host"),
    ],
)
def test_what_can_not_be_protected_is_said_and_loads_as_ever(
    make: Callable[[], Any], why: str, said: list[str]
) -> None:
    result, _ = load(make())
    assert result == CALLED
    (sentence,) = said
    assert sentence.startswith(f"torchtitan 0.0: recognised, but not protected: {why}")


class Protection:
    """What protection.begin returns, of a training that goes on from this step."""

    def __init__(self, restored: int) -> None:
        self.restored, self.told = restored, list[str]()
        loop = SimpleNamespace(begin_pass=lambda _: (None, 0), minibatches=0)
        self.job = SimpleNamespace(root="ckpt", loop=loop)

    def go_on_now(self) -> None:
        self.told.append("goes on")

    def step_is_over(self) -> None:
        self.told.append("over")


def begin(monkeypatch: pytest.MonkeyPatch, state: dict[str, int] | None) -> tuple[Any, Protection]:
    """Begin a training with this state restored; return the Trainer, and what was told."""
    protected = Protection(0 if state is None else state["step"])

    def restore(*_: Any, progress: Any, **__: Any) -> Protection:
        if state is not None:
            progress.load_state_dict(state)
        return protected

    monkeypatch.setattr(protection, "begin", restore)
    made = trainer()
    result, manager = load(made)
    assert (result, manager.calls) == ((CALLED, ["load"]) if state is None else (True, []))
    return made, protected


def test_a_first_start_loads_as_ever_and_each_step_ends_at_the_loops_head(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    made, protected = begin(monkeypatch, None)
    assert made.should_continue_training()
    assert protected.told == ["goes on"]
    made.step = 1
    assert made.should_continue_training()
    assert protected.told == ["goes on", "over"]
    made.step = 7
    assert not made.should_continue_training()


@pytest.mark.parametrize("over", [6, 7])
def test_what_follows_the_restored_step_is_done_unless_it_was(
    over: int, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    made, _ = begin(monkeypatch, {"step": 7, "tokens": 70, "over": over})
    assert (made.step, made.ntokens_seen) == (7, 70)
    assert not made.should_continue_training()
    assert made.checkpointer.calls == ([] if over == 7 else [("save", 7, True), ("validate", 7)])
    (sentence,) = said  # its own checkpoint is of step 9
    assert sentence.startswith("torchtitan's checkpoint of step 9 is newer than the save of step 7")
