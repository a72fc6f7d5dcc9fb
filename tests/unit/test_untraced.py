"""What torch.compile makes of a training has no hook of jitckpt in it, and each hook is called as ever."""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from jitckpt.hooks import untraced
from jitckpt.hooks.torch_steps import OptimizerSteps
from jitckpt.hooks.torch_training import TrainingHooks

STEPS = 4
WHY = "call torch.compile before jitckpt"


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


def test_where_nothing_is_compiled_nothing_of_torch_is_called_before_a_hook() -> None:
    callers = []

    def hook(number: int, *, name: str) -> str:
        callers.append(sys._getframe(1).f_code)
        return f"{name} {number}"

    assert untraced.untraced(hook)(1, name="hook") == "hook 1"
    assert callers == [sys._getframe().f_code]


def test_a_hook_that_is_called_by_compiled_code_is_not_compiled() -> None:
    looked_into = []
    hook = untraced.untraced(
        lambda: looked_into.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
    )

    @torch.compile(backend="eager")
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        doubled = 2 * tensor
        hook()
        return doubled + 1

    assert compiled(torch.ones(1)) == 3
    assert looked_into == [None]


def test_a_torch_that_does_not_tell_has_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback")
    callers: list[str] = []
    untraced.untraced(lambda: callers.append(sys._getframe(1).f_code.co_filename))()
    assert callers[0].endswith("eval_frame.py")


@pytest.mark.parametrize("given", [True, False])
def test_a_graph_that_must_not_be_cut_says_why_it_can_not_be_made(given: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = TrainingHooks(Told(), model=model, optimizers=[optimizer] if given else [])
    try:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=WHY):
            torch.compile(lambda: model(torch.ones(1, 2)), backend="eager", fullgraph=True)()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=WHY):
            torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    finally:
        hooks.detach()
