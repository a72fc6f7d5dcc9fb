"""What torch.compile makes of a training has no hook of jitckpt in it, and each hook is called as ever."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from jitckpt.hooks.torch_steps import OptimizerSteps
from jitckpt.hooks.torch_training import TrainingHooks

STEPS = 4


class Told:
    """Notes what it is told, and whether by compiled code."""

    def __init__(self) -> None:
        self.ended = 0
        self.is_compiled = False

    def _told(self, *_: object) -> None:
        self.is_compiled |= torch.compiler.is_compiling()

    def step_ended(self, *_: object) -> None:
        self._told()
        self.ended += 1

    minibatch_begun = forward_ended = step_begun = step_begins = unsupported = failed = _told
    passed_again = closure_again = unequal_turns = minibatch_ended = _told
    drawn_ahead = steps_again = several_steps = captured_step = _told


@pytest.fixture(autouse=True)
def _nothing_compiled_stays() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attach(way: str, told: Told, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if way == "transparent":
        return OptimizerSteps(told)
    optimizers = [optimizer] if way == "given" else []
    on_phase = told._told if way == "rehearsed" else None
    return TrainingHooks(told, model=model, optimizers=optimizers, on_phase=on_phase)


@pytest.mark.parametrize("way", ["given", "found", "rehearsed", "transparent"])
def test_a_compiled_minibatch_is_told_of_by_code_that_is_not_compiled(way: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = Told()
    hooks = attach(way, told, model, optimizer)
    try:
        model.compile(backend="eager")

        @torch.compile(backend="eager")
        def step() -> None:
            optimizer.step()

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*does not know how to trace.*")
            for _ in range(STEPS):
                model(torch.ones(1, 2)).sum().backward()
                step()
                optimizer.zero_grad()
    finally:
        hooks.detach()
    assert told.ended == STEPS
    assert not told.is_compiled


@pytest.mark.parametrize("how", ["in place", "another", "called both ways"])
def test_a_model_that_is_compiled_as_one_graph_trains_as_ever(how: str) -> None:
    """torch refuses to compile it with a hook that cuts it: the training would end in its first step."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = Told()
    called: list[nn.Module] = [model] * STEPS
    if how == "in place":
        model.compile(backend="eager", fullgraph=True)
    else:
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        called = [compiled] * STEPS if how == "another" else [model, compiled] * 2
    hooks = TrainingHooks(told, model=model, optimizers=[optimizer])
    forward: list[int] = []
    told.forward_ended = forward.append  # type: ignore[assignment, method-assign]
    for one in called:
        one(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hooks.detach()
    assert forward == [1, 2, 3, 4]
    assert told.ended == STEPS
    assert not told.is_compiled
