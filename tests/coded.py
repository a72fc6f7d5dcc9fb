"""Tensors made of others, as torchao and the like make them: wrapper subclasses with a few operations.

Scripts that tests start find it beside them (end_to_end/coded.py is a link).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

LARGEST_CODE = 127


class Coded(Tensor):
    """Codes of 8 bits and a scale; it looks like numbers of 32 bits. `offset` belongs to it, too."""

    codes: Tensor
    scale: Tensor
    offset: float

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, offset: float) -> "Coded":
        made: Coded = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale, made.offset = codes, scale, offset
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {"offset": self.offset}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: Mapping[str, Any], size: Any, stride: Any
    ) -> "Coded":
        return cls(inner["codes"], inner["scale"], context["offset"])

    @classmethod
    def of(cls, values: Tensor, offset: float = 0.0) -> "Coded":
        made = cls(
            torch.zeros_like(values, dtype=torch.int8),
            torch.ones((), dtype=torch.float32, device=values.device),
            offset,
        )
        made.show(values)
        return made

    def show(self, values: Tensor) -> None:
        values = values - self.offset
        self.scale.copy_(values.abs().max().clamp(min=1e-12) / LARGEST_CODE)
        self.codes.copy_((values / self.scale).round())

    def values(self) -> Tensor:
        return self.codes.to(torch.float32) * self.scale + self.offset

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        mine = args[0] if args and isinstance(args[0], cls) else None
        if func is torch.ops.aten.detach.default and mine is not None:
            return cls(mine.codes, mine.scale, mine.offset)
        if func is torch.ops.aten.view.default and mine is not None and tuple(args[1]) == tuple(mine.shape):
            return cls(mine.codes, mine.scale, mine.offset)  # as DTensor.from_local asks for it
        if func is torch.ops.aten._to_copy.default and mine is not None:
            device = (kwargs or {}).get("device")
            return cls(mine.codes.to(device, copy=True), mine.scale.to(device, copy=True), mine.offset)
        args, kwargs = _pytree.tree_map_only(cls, Coded.values, (args, dict(kwargs or {})))
        result = func(*args, **kwargs)
        if (
            func._schema.is_mutable and mine is not None
        ):  # it was made in the place of values that nobody keeps
            mine.show(args[0])
            return mine
        return result


class CodedMomentum(torch.optim.Optimizer):
    """Gradient descent with a momentum in codes."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    if not state:
                        state["mean"] = coded_like(one)
                        state["peak"] = torch.zeros((), device=one.device)
                    mean = state["mean"]
                    local(mean).copy_(values_of(mean) * 0.9 + values_of(one.grad))
                    state["peak"].copy_(values_of(mean).abs().max())
                    local(one).sub_(group["lr"] * values_of(mean))


def local(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def values_of(tensor: Tensor) -> Tensor:
    own = local(tensor)
    return own.values() if isinstance(own, Coded) else own.detach()


def coded_like(parameter: Tensor) -> Tensor:
    """Return zeros in codes that lie as a parameter does: of a DTensor a DTensor."""
    from torch.distributed.tensor import DTensor

    made: Tensor = Coded.of(torch.zeros_like(values_of(parameter)), 0.25)
    if isinstance(parameter, DTensor):
        made = DTensor.from_local(
            made,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return made


def inner_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that one is made of."""
    own = local(tensor)
    return [own.codes, own.scale] if isinstance(own, Coded) else [own.detach()]
