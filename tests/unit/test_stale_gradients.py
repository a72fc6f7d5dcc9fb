"""A step that goes by a gradient of an earlier minibatch is seen, and in no ordinary loop."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from jitckpt.hooks import stale_gradients
from jitckpt.hooks.stale_gradients import EVERY, FIRST_LOOKS, StaleGradients

FROZEN = 5  # the branch, from this step on, and used no more


class Training:
    def __init__(self) -> None:
        self.net = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("trunk", "branch", "never")})
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.stale = StaleGradients()
        self.named: list[set[str]] = []  # in each step

    def run(
        self, clear: Callable[["Training"], object], *, clips: bool = False, freezes: bool = True
    ) -> None:
        for step in range(1, FROZEN + 4):
            x = torch.ones(1, 2)
            if freezes and step == FROZEN:
                self.net["branch"].requires_grad_(False)
            clear(self)
            uses = step < FROZEN and freezes
            (self.net["trunk"](x) + (self.net["branch"](x) if uses else 0)).sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
            self.optimizer.step()
            self.end_step(is_changed=freezes and step == FROZEN)

    def end_step(self, *, is_changed: bool = False) -> None:
        found = self.stale.step_ended(lambda: dict(self.net.named_parameters()), is_changed=is_changed)
        self.named.append({*found})


def of_trained_alone(training: Training) -> None:
    for parameter in training.net.parameters():
        if parameter.requires_grad:
            parameter.grad = None


@pytest.mark.parametrize("clips", [False, True])
def test_a_frozen_one_that_keeps_its_gradient_is_named_in_the_next_step(clips: bool) -> None:
    training = Training()
    training.run(of_trained_alone, clips=clips)
    assert [named for named in training.named if named] == [{"branch.weight", "branch.bias"}]
    assert training.named[FROZEN]  # in the step FROZEN + 1


def test_one_that_is_never_cleared_is_named_at_once_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.net["branch"](torch.ones(1, 2)).sum().backward()
    monkeypatch.setattr(stale_gradients, "EVERY", 6)
    training.run(lambda training: training.net["trunk"].zero_grad(), freezes=False)
    named = [step for step, found in enumerate(training.named, 1) if found]
    assert named == [2, FIRST_LOOKS, 7]
    assert EVERY > FIRST_LOOKS


CLEARS: list[Callable[[Training], object]] = [
    lambda training: training.optimizer.zero_grad(),
    lambda training: training.optimizer.zero_grad(set_to_none=False),
]


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("clear", CLEARS)
def test_no_ordinary_loop_is_named(clear: Callable[[Training], object], freezes: bool) -> None:
    training = Training()
    training.run(clear, freezes=freezes)
    assert not any(training.named)


def test_one_without_a_step_of_its_optimizer_is_left_alone() -> None:
    """As a critic that is trained in every other minibatch."""
    training = Training()
    training.net["branch"](torch.ones(1, 2)).sum().backward()
    for _ in range(FIRST_LOOKS):
        training.end_step()
    assert not any(training.named)
