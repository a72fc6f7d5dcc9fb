"""An optimizer that steps with another's parameters is told of, and none that belongs to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from jitckpt.hooks.other_optimizers import OtherOptimizers


class Training:
    """Two layers, and one optimizer that the job is given."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.beside = nn.Linear(2, 2)
        self.given: Optimizer = SGD(self.net.parameters(), lr=0.1)
        self.told: list[tuple[type, bool]] = []
        self.begun = 0
        self.elsewhere: list[tuple[type, bool]] = []
        self.says_all = False

    def watch(self) -> OtherOptimizers:
        return OtherOptimizers([self.given], self)

    def other_step_begins(self) -> None:
        self.begun += 1

    def stepped_elsewhere(self, optimizer: Optimizer) -> bool:
        self.elsewhere.append((type(optimizer), self.says_all))
        return self.says_all

    def other_stepped(self, optimizer: Optimizer, *, has_begun: bool) -> None:
        assert self.begun
        if (type(optimizer), has_begun) not in self.told:
            self.told.append((type(optimizer), has_begun))

    def steps(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.net(torch.ones(1, 2)).sum().backward()
            optimizer.step()


@pytest.fixture
def training() -> Training:
    return Training()


class Around(Optimizer):
    """Over the same parameters, with something of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.state["made"] = {"steps": 1}  # type: ignore[index]


class Lookahead(Around):
    """Its inner optimizer is made in its first step, so nobody finds it before."""

    def __init__(self, parameters: Any) -> None:
        Optimizer.__init__(self, parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not hasattr(self, "inner"):
            self.inner = Adam(self.param_groups[0]["params"])
        super().step()


def new(training: Training) -> None:
    training.steps(training.given)
    training.steps(Adam(training.net.parameters()))


def new_of_the_same_kind(training: Training) -> None:
    other = SGD(training.net[1].parameters(), lr=0.1)
    training.steps(training.given, other, other, other)


def in_turns_with_state(training: Training) -> None:
    other = Adam(training.net.parameters())
    training.steps(training.given, other, training.given, other)


def never_the_given(training: Training) -> None:
    other = Adam(training.net.parameters())
    training.steps(other, other, other)


def only_the_given(training: Training) -> None:
    training.steps(training.given, training.given)


def in_turns_without_state(training: Training) -> None:
    other = SGD(training.net.parameters(), lr=0.01)
    training.steps(*[training.given, other] * 3)


def other_parameters(training: Training) -> None:
    training.steps(training.given, *[Adam(training.beside.parameters())] * 3)


def around_the_given(training: Training) -> None:
    around = Around(training.given)
    training.steps(around, around, around)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (new, [(Adam, True)]),
        (new_of_the_same_kind, [(SGD, True)]),
        (in_turns_with_state, [(Adam, True)]),
        (never_the_given, [(Adam, False)]),
        (only_the_given, []),
        (in_turns_without_state, []),
        (other_parameters, []),
        (around_the_given, []),
    ],
)
def test_what_takes_a_given_optimizers_place_is_told(
    training: Training, script: Callable[[Training], None], told: list[tuple[type, bool]]
) -> None:
    watched = training.watch()
    try:
        script(training)
    finally:
        watched.end()
    assert training.told == told


def test_what_a_given_optimizer_makes_inside_is_its_own(training: Training) -> None:
    training.given = Lookahead(training.net.parameters())
    watched = training.watch()
    training.steps(training.given, training.given, training.given)
    watched.end()
    training.steps(SGD(training.net.parameters(), lr=0.1, momentum=0.9))
    assert training.told == []


def test_one_with_parameters_of_no_given_one_is_told_until_all_is_said_of_it(training: Training) -> None:
    watched = training.watch()
    late = Adam(training.beside.parameters())
    training.steps(late)  # before the training
    training.steps(training.given, late)
    training.says_all = True
    training.steps(late, late, training.given, late)
    watched.end()
    training.steps(Adam(training.beside.parameters()))
    assert training.elsewhere == [(Adam, False), (Adam, True)]
    assert training.told == []
