"""What a state will have is known before the first step: never more than it then has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.state.expected_size import least_bytes

Make = Callable[[Any], Optimizer]
OPTIMIZERS: list[Make] = [
    torch.optim.Adadelta,
    torch.optim.Adam,
    lambda given: torch.optim.Adam(given, amsgrad=True),
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    lambda given: torch.optim.RMSprop(given, momentum=0.9, centered=True),
    torch.optim.Rprop,
    lambda given: torch.optim.SGD(given, lr=0.1),
    lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
]


def state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return what is there, but for numbers, such as counts of steps."""
    kept = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    return sum(one.nbytes for one in [*model.parameters(), *kept] if one.dim())


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_it_is_what_the_first_step_leaves(make: Make) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4).to(torch.bfloat16))
    model[0].bias.requires_grad_(False)
    optimizer = make([one for one in model.parameters() if one.requires_grad])
    expected = least_bytes(model, [optimizer])
    model[1](model[0](torch.ones(2, 8)).to(torch.bfloat16)).sum().backward()
    optimizer.step()
    assert expected == state_bytes(model, optimizer)


def test_of_an_optimizer_that_nobody_knows_parameters_alone_count() -> None:
    class Adam(torch.optim.Adam):
        """Another one, which may keep less."""

    model = nn.Linear(8, 16)
    assert least_bytes(model, [Adam(model.parameters())]) == 4 * (8 * 16 + 16)


def test_what_is_tied_counts_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert least_bytes(model, [torch.optim.Adam(model.parameters())]) == 3 * 4 * 64
