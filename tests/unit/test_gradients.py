"""What a rank says of its optimizer step, for another host to make it again; and when it can't."""

from typing import Any

import pytest
import torch
from torch import nn

from jitckpt.state.host_state import HostState
from jitckpt.tiers.optimizer_step import Stepped
from jitckpt.worker.saving import gradients
from jitckpt.worker.saving.gradients import CannotBeMadeError


def trained(*kinds: Any, frozen: bool = False, **options: Any) -> HostState:
    """Return a training whose second step is about to begin."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(not frozen)
    optimizers = [kind(model.parameters(), **{"lr": 0.5, **options}) for kind in kinds]
    for _ in range(2):
        for one in optimizers:
            one.step()
        model(torch.ones(1, 3)).sum().backward()
    for one in optimizers:
        one.step()
    return host_of(model, optimizers)


def host_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> HostState:
    return HostState(model=model, optimizers=optimizers, schedulers=[], scaler=None, extra=None, device=None)


def test_names_and_numbers_are_those_before_the_step() -> None:
    taken = gradients.take(trained(torch.optim.AdamW), None)
    assert taken is not None
    assert taken.kind == "AdamW"
    assert taken.elsewhere == []
    (group,) = taken.groups
    assert group.options["lr"] == 0.5
    assert group.parameters == [
        Stepped("model.weight", "optimizer.0.state.0.", None, {"step": ("float32", 2.0)}),
        Stepped("model.bias", "optimizer.0.state.1.", None, {"step": ("float32", 2.0)}),
    ]
    assert [*taken.gradients] == ["gradient.model.weight", "gradient.model.bias"]
    made = taken.placed({"gradient.model.weight": ("float32", [2, 3], 64)}, 96)
    assert [one.gradient for one in made.parameters()] == [("float32", [2, 3], 64), None]


def test_parameters_of_which_this_rank_has_no_row_are_told_apart() -> None:
    """They lie nowhere, all of them alike."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[1].weight, model[1].bias = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.empty(0))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        taken = gradients.take(host_of(model, [optimizer]), None)
        optimizer.step()
    assert taken is not None
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    assert [one.tensor for one in taken.groups[0].parameters] == names
    shapes = [list(one.shape) for one in taken.gradients.values()]
    assert shapes == [[2, 3], [2], [0, 2], [0]]


def test_what_is_frozen_has_no_gradient_and_no_step() -> None:
    taken = gradients.take(trained(torch.optim.AdamW, frozen=True), None)
    assert taken is not None
    assert [one.tensor for one in taken.groups[0].parameters] == ["model.weight"]


def test_a_first_step_has_no_state_to_begin_with() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    assert gradients.take(host_of(model, [optimizer]), None) is None


@pytest.mark.parametrize(
    ("host", "scaler", "says"),
    [
        (trained(torch.optim.SGD, torch.optim.SGD, momentum=0.9), None, "there are 2 optimizers"),
        (trained(torch.optim.RMSprop), None, "the optimizer is a RMSprop, and it must be one of"),
        (trained(torch.optim.AdamW), object(), "a GradScaler may leave out steps"),
        (trained(torch.optim.Adam, lr=torch.tensor(0.5)), None, "the optimizer's lr is no plain number"),
    ],
)
def test_what_no_host_can_make_again_is_refused(host: HostState, scaler: object, says: str) -> None:
    with pytest.raises(CannotBeMadeError, match=says):
        gradients.take(host, scaler)


def test_gradients_that_change_before_they_are_copied_are_noticed() -> None:
    host = trained(torch.optim.AdamW)
    taken = gradients.take(host, None)
    assert taken is not None
    taken.check()
    host.optimizers[0].optimizer.zero_grad()
    taken.check()  # they are let go, and stay what they are
    for gradient in taken.gradients.values():
        gradient.zero_()
    with pytest.raises(CannotBeMadeError, match=r"the gradient of model.weight changes in the step"):
        taken.check()
