"""Which parameters have a gradient as a minibatch begins: zeros, where a script does not take it away.

With zeros (zero_grad(set_to_none=False)) an optimizer decays a parameter, and moves it by its momentum;
without a gradient it leaves it alone. So a parameter that a minibatch does not use (a branch, an expert, a
frozen layer) has to have after a restart what it had. Which ones have some is taken as the forward pass
begins, or the loop goes on. What a script clears behind that, it clears after a restart, too; what it cleared
before that, it may clear once more, and nothing changes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jitckpt.state import tensors_seen
from jitckpt.state.tensors_seen import NO_GRADIENT, SPARSE


class Gradients(NamedTuple):
    """Of each parameter, by name: whether it has a gradient, as tensors_seen says it, a byte each."""

    names: tuple[str, ...] = ()
    kinds: bytes = b""

    def there(self) -> dict[str, int]:
        """Return what kind of gradient those have that have one."""
        pairs = zip(self.names, self.kinds, strict=True)
        return {name: kind for name, kind in pairs if kind != NO_GRADIENT}

    def without(self, gone: frozenset[str]) -> "Gradients":
        """Return it without the gradients of these."""
        if not gone:
            return self
        pairs = zip(self.names, self.kinds, strict=True)
        return Gradients(self.names, bytes([NO_GRADIENT if name in gone else kind for name, kind in pairs]))

    def taken_away(self, now: "Gradients") -> frozenset[str]:
        """Return those that had a gradient and have none any more."""
        return frozenset() if self == now else frozenset(self.there().keys() - now.there().keys())


class GradientsSeen:
    """Looks at the parameters of a job."""

    def __init__(self) -> None:
        self._parameters: tuple[Tensor, ...] = ()
        self._last = Gradients()

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Look at these from now on."""
        self._last, self._parameters = Gradients((*parameters,)), (*parameters.values(),)

    def look(self) -> Gradients:
        """Return which there are now; the same object while these are the same."""
        kinds = tensors_seen.gradients_there(self._parameters)
        if kinds != self._last.kinds:
            self._last = Gradients(self._last.names, kinds)
        return self._last


def put(parameters: Mapping[str, Tensor], saved: Mapping[str, int]) -> None:
    """Let those parameters that had a gradient have one of zeros, and the others none."""
    for name, parameter in parameters.items():
        kind = saved.get(name, NO_GRADIENT)
        there = parameter.grad
        if kind != NO_GRADIENT and there is not None and there.is_sparse == (kind == SPARSE):
            there.detach().zero_()  # the same tensor: a CUDA graph that was captured before writes to it
        else:
            parameter.grad = None if kind == NO_GRADIENT else _zeros(parameter, is_sparse=kind == SPARSE)


def _zeros(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter, requires_grad=False)
    # As an embedding's backward pass makes it: rows, of which there are none.
    rows = parameter.new_empty((0, *parameter.shape[1:]), requires_grad=False)
    numbers = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(numbers, rows, parameter.shape, check_invariants=True)
