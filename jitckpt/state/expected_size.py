"""How many bytes a training's state has at least once its first step is made, known before that.

Parameters are there as the job begins. What the optimizer keeps of each it makes in its first step; how many
tensors like the parameter that are is known for torch's own optimizers, by class and options. What is not
known counts as nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jitckpt.state import parallel

Group = Mapping[str, Any]

# By class: tensors of a parameter's size that the first step makes for it, by the group's options.
_MADE: Mapping[str, Callable[[Group], int]] = {
    "Adadelta": lambda group: 2,
    "Adam": lambda group: 2 + bool(group["amsgrad"]),
    "AdamW": lambda group: 2 + bool(group["amsgrad"]),
    "Adamax": lambda group: 2,
    "ASGD": lambda group: 1,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "RMSprop": lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    "Rprop": lambda group: 2,
    "SGD": lambda group: int(group["momentum"] != 0),
}


def least_bytes(model: nn.Module | None, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of what this rank holds of parameters and optimizers, after the first step."""
    found: dict[int, int] = {}  # bytes, by the memory's id
    size = 0
    for optimizer in optimizers:
        keeper, _ = parallel.way_to_state(optimizer)[-1]
        own = parallel.own_state(optimizer)
        for group in keeper.param_groups:
            for parameter in group["params"]:
                found[id(parallel.memory_of(parameter))] = parallel.held_bytes(parameter)
                if not own.get(parameter):
                    size += _made(keeper, group, parameter) * parallel.local(parameter).nbytes
                size += sum(_on_device(one) for one in own.get(parameter, {}).values())
    for parameter in () if model is None else parallel.parameters(model).values():
        found[id(parallel.memory_of(parameter))] = parallel.held_bytes(parameter)
    return size + sum(found.values())


def _made(optimizer: Optimizer, group: Group, parameter: Tensor) -> int:
    of_torch = type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)
    count = _MADE.get(type(optimizer).__name__) if of_torch and parameter.requires_grad else None
    return 0 if count is None else count(group)


def _on_device(value: object) -> int:
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return 0
    return parallel.held_bytes(value)
