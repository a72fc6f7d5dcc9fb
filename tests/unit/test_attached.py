"""Models, optimizers and scalers that hooks hang on are copied and pickled as if there were none."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from jitckpt.hooks.torch_steps import OptimizerSteps
from jitckpt.hooks.torch_training import TrainingHooks


class Counts:
    """Counts all that it is told."""

    def __init__(self) -> None:
        self.told = 0

    def _count(self, *_: object) -> None:
        self.told += 1

    minibatch_begun = forward_ended = step_begun = step_ended = step_begins = unsupported = failed = _count
    passed_again = closure_again = unequal_turns = minibatch_ended = _count
    drawn_ahead = steps_again = several_steps = captured_step = _count


class WithItsAttributes(torch.optim.SGD):
    """An optimizer that is pickled with all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2))
        self.optimizer = WithItsAttributes(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = GradScaler("cpu", init_scale=2.0)
        self.counts = Counts()

    def step(self) -> None:
        self.scaler.scale(self.model(torch.ones(1, 2)).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    hooks = TrainingHooks(
        made.counts,
        model=made.model,
        optimizers=[made.optimizer],
        scaler=made.scaler,
        on_phase=made.counts._count,
    )
    made.step()
    yield made
    hooks.detach()


def pickled(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))


def saved(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])


@WAYS
def test_a_copy_trains_and_nothing_is_told(training: Training, copied: Callable[[Any], Any]) -> None:
    told, scale = training.counts.told, training.scaler.get_scale()
    weights = copy.deepcopy(training.model.state_dict())
    other = Training()
    other.model, other.optimizer, other.scaler = copied((training.model, training.optimizer, training.scaler))
    for _ in range(3):
        other.step()
    assert other.scaler._growth_tracker.item() == 4  # type: ignore[union-attr]
    assert training.counts.told == told
    assert training.scaler.get_scale() == scale
    assert training.scaler._growth_tracker.item() == 1  # type: ignore[union-attr]
    for name, value in training.model.state_dict().items():
        assert value.equal(weights[name])
        assert not value.equal(other.model.state_dict()[name])
    training.step()
    assert training.counts.told > told


def test_an_average_of_the_model_is_free_of_hooks(training: Training) -> None:
    average = AveragedModel(training.model)
    told = training.counts.told
    average.update_parameters(training.model)
    average(torch.ones(1, 2)).sum().backward()
    assert training.counts.told == told


@WAYS
def test_a_copied_optimizer_is_free_of_what_transparent_mode_hangs_on_it(
    copied: Callable[[Any], Any],
) -> None:
    counts = Counts()
    steps = OptimizerSteps(counts)
    try:
        training = Training()
        training.step()
        other = Training()
        other.model, other.optimizer, other.scaler = copied(
            (training.model, training.optimizer, training.scaler)
        )
        assert other.optimizer.__dict__["_jitckpt_state"] is None
        before = steps.step
        other.step()  # it is an optimizer like any other
        training.step()
        assert steps.step == before + 2
        assert steps.optimizers() == [training.optimizer, other.optimizer]
    finally:
        steps.detach()


def test_who_loads_the_model_needs_no_jitckpt(training: Training, tmp_path: Path) -> None:
    torch.save((training.model, training.scaler), tmp_path / "model.pt")
    program = """
import sys
sys.modules["jitckpt.hooks"] = None
import torch
model, scaler = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(1, 2)).shape, scaler.step.__self__ is scaler)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "model.pt"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["torch.Size([1,", "2])", "True"]
