"""Gradients that go on into the next step are seen, and in no ordinary loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from jitckpt.hooks.carried_gradients import LOOKS, CarriedGradients


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Embedding(3, 2, sparse=True))


class Training:
    """Ends LOOKS + 2 steps and tells of each."""

    def __init__(self) -> None:
        self.net, self.other = net(), nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.failures: list[Exception] = []
        self.gradients = CarriedGradients(self.failures.append)
        self.named: list[str] = []

    def run(self, minibatch: Callable[["Training", int], None]) -> None:
        for step in range(LOOKS + 2):
            minibatch(self, step)
            if self.gradients.is_looking:
                self.named += self.gradients.step_ended(lambda: dict(self.net.named_parameters()))
        assert not self.gradients.is_looking

    def loss(self) -> Tensor:
        return self.net[1](self.net[0](torch.ones(1, 2))).sum() + self.net[2](torch.tensor([0])).sum()  # type: ignore[no-any-return]


def decayed(training: Training, step: int) -> None:
    for parameter in training.net.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.mul_(0.9)
    training.loss().backward()
    training.optimizer.step()


def one_decayed(training: Training, step: int) -> None:
    kept = training.net[0].weight.grad
    training.optimizer.zero_grad()
    training.net[0].weight.grad = kept
    training.loss().backward()
    training.optimizer.step()


def every_other(training: Training, step: int) -> None:
    if step % 2 == 0:
        training.optimizer.zero_grad()
    training.loss().backward()
    training.optimizer.step()


def set_to_none(training: Training, step: int) -> None:
    loss = training.loss()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


def set_to_zero(training: Training, step: int) -> None:
    training.loss().backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


def accumulated(training: Training, step: int) -> None:
    for _ in range(3):
        training.loss().backward()
    training.optimizer.step()
    training.net.zero_grad()


def evaluated(training: Training, step: int) -> None:
    set_to_none(training, step)
    training.loss()


def against_another(training: Training, step: int) -> None:
    """As a discriminator, whose gradients are made in its generator's pass, too."""
    set_to_none(training, step)
    (training.loss() * training.other(torch.ones(1))).sum().backward()


def by_closure(training: Training, step: int) -> None:
    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    training.optimizer.step(closure)
    training.optimizer.step(closure)


def unused(training: Training, step: int) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    training.net[0](torch.ones(1, 2)).sum().backward()
    training.optimizer.step()


@pytest.mark.parametrize(
    ("minibatch", "names"),
    [
        (decayed, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (one_decayed, {"0.weight"}),
        (every_other, {"0.weight", "0.bias", "1.weight", "1.bias"}),
        (set_to_none, set()),
        (set_to_zero, set()),
        (accumulated, set()),
        (evaluated, set()),
        (against_another, set()),
        (by_closure, set()),
        (unused, set()),
    ],
)
def test_gradients_that_are_carried_on_are_named(
    minibatch: Callable[[Training, int], None], names: set[str]
) -> None:
    training = Training()
    training.run(minibatch)
    assert {*training.named} == names
    assert len(training.named) == len(names)
    assert not training.failures


def test_what_fails_in_a_look_is_not_the_trainings_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: Tensor) -> Tensor:
        raise ValueError("no look")

    training = Training()
    monkeypatch.setattr(Tensor, "any", fails)
    training.run(decayed)
    assert [str(error) for error in training.failures] == ["no look"]
