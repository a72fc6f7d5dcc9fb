"""What another host needs to make this rank's optimizer step again: gradients, and how the step was made.

Taken as the step begins, when gradients are what it takes: the values are copied as it ends (snapshots.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitckpt.state import parallel
from jitckpt.state.host_state import HostState
from jitckpt.state.optimizer_state import OptimizerState
from jitckpt.tiers.optimizer_step import KINDS, OptimizerStep, ParameterGroup, Place, Stepped
from jitckpt.tiers.shard import dtype_name

PREFIX = "gradient."  # of the gradients' names among the copies; no tensor of a state begins so
PLAIN = (bool, int, float, str, type(None))


class CannotBeMadeError(Exception):
    """No host makes such a step; the text is a clause that says why."""


@dataclass(frozen=True)
class StepTaken:
    """An optimizer step as it begins.

    gradients: by the names of their copies; versions: how often each had been written to.
    """

    kind: str
    groups: Sequence[ParameterGroup]  # of which each gradient's place is still unknown
    elsewhere: Sequence[str]
    gradients: Mapping[str, Tensor]
    versions: Sequence[int]

    def check(self) -> None:
        """See that the gradients are as they were. Raises CannotBeMadeError."""
        for (name, gradient), version in zip(self.gradients.items(), self.versions, strict=True):
            if gradient._version != version:
                raise CannotBeMadeError(
                    f"the gradient of {name.removeprefix(PREFIX)} changes in the step, or behind it before "
                    "the minibatch ends: call zero_grad() without arguments, which sets gradients to None"
                )

    def placed(self, places: Mapping[str, Place], sent: int) -> OptimizerStep:
        """Return it with the places of the gradients' copies; sent: what is no part of the step's making."""
        groups = [
            ParameterGroup(
                group.options,
                [
                    Stepped(one.tensor, one.state, places.get(PREFIX + one.tensor), one.numbers)
                    for one in group.parameters
                ],
            )
            for group in self.groups
        ]
        return OptimizerStep(self.kind, groups, self.elsewhere, sent)


def take(host: HostState, scaler: object) -> StepTaken | None:
    """Return the step that begins; None as long as the optimizer has no state. Raises CannotBeMadeError."""
    if len(host.optimizers) != 1:
        raise CannotBeMadeError(f"there are {len(host.optimizers)} optimizers, and it must be one")
    if scaler is not None or host.scaler is not None:
        raise CannotBeMadeError("a GradScaler may leave out steps")
    (state,) = host.optimizers
    keeper = parallel.way_to_state(state.optimizer)[-1][0]
    kind = type(keeper).__name__
    if kind not in KINDS or type(keeper) is not getattr(torch.optim, kind):
        raise CannotBeMadeError(f"the optimizer is a {type(keeper).__name__}, and it must be one of {KINDS}")
    names = _names(host, state)
    numbers = {id(one): number for number, one in enumerate(state.parameters())}
    kept = parallel.own_state(state.optimizer)
    gradients: dict[str, Tensor] = {}

    def stepped(parameter: Tensor) -> Stepped:
        name = names(parameter)
        if parameter.grad is not None:
            gradients[PREFIX + name] = _gradient(parameter, name)
        of_host = {
            key: (dtype_name(value.dtype), value.item())
            for key, value in kept.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1
        }
        return Stepped(name, f"{state.name}.state.{numbers[id(parameter)]}.", None, of_host)

    own = keeper.param_groups
    # What a scheduler has set the optimizer inside hears of in its step.
    outer = state.optimizer.param_groups if len(state.optimizer.param_groups) == len(own) else own
    groups = [
        ParameterGroup(
            _options({**group, **around}),
            [stepped(one) for one in group["params"] if one.grad is not None or kept.get(one)],
        )
        for group, around in zip(own, outer, strict=True)
    ]
    if not gradients or not any(kept.values()):
        return None
    here = {one.tensor for group in groups for one in group.parameters}
    others = {names(one) for one in state.parameters()} - here if keeper is not state.optimizer else set()
    versions = [one._version for one in gradients.values()]
    return StepTaken(kind, groups, sorted(others), gradients, versions)


def _names(host: HostState, state: OptimizerState) -> Callable[[Tensor], str]:
    """Return what tells a parameter's name in a save."""
    held = {} if host.model is None else host.model.parameters()
    named = {f"model.{name}": tensor for name, tensor in held.items()}
    named |= {f"{state.name}.{name}": parallel.local(one) for name, one in state.own_parameters().items()}
    places = {(one.data_ptr(), one.nbytes): name for name, one in named.items() if one.is_contiguous()}
    called = {} if host.model is None else dict(host.model.names())
    called |= {id(one): f"{state.name}.{name}" for name, one in state.own_parameters().items()}

    def name_of(parameter: Tensor) -> str:
        if parallel.is_wrapper(parameter):
            raise CannotBeMadeError("a parameter of the optimizer is made of other tensors")
        local = parallel.local(parameter)
        # All of which this rank has no row lie at one place, which is none.
        name = places.get((local.data_ptr(), local.nbytes)) if local.numel() else called.get(id(parameter))
        if name not in named:
            raise CannotBeMadeError("a parameter of the optimizer is none that is saved as it lies in memory")
        return name

    return name_of


def _gradient(parameter: Tensor, name: str) -> Tensor:
    assert parameter.grad is not None
    gradient = parallel.local(parameter.grad)
    if gradient.layout != torch.strided or gradient.shape != parallel.local(parameter).shape:
        raise CannotBeMadeError(f"the gradient of {name} is sparse, or of another shape")
    return gradient


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key, value in found.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if type(one) not in PLAIN or (isinstance(one, float) and not math.isfinite(one)):
                raise CannotBeMadeError(f"the optimizer's {key} is no plain number")
    return found
