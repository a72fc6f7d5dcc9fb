"""Sees gradients that a training carries on from one optimizer step to the next: no save has them.

As a rule they begin anew for each step. Whether they do is seen as a backward pass adds to them, in the first
minibatches alone: a loop does in each what it does in these. Between two steps there may be several passes,
and one may find gradients that nobody wants, as a discriminator's in its generator's pass: so a parameter is
innocent if any of its passes has begun with none.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from jitckpt.hooks.guard import Guard
from jitckpt.state import parallel

LOOKS = 3  # from step to step
SMALLEST, LARGEST = 32, 4  # parameters that are looked at, if there are more


class CarriedGradients:
    """Of one training, from its first step on."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """failed: called once, where it can't look."""
        self._guard = Guard(failed)
        self._looks, self.is_looking = 0, True
        self._parameters: dict[str, Tensor] = {}
        self._found: dict[str, list[Tensor]] = {}  # what each pass has added to, as one number
        self._clean: set[str] = set()
        self._hooked: list[tuple[Node, RemovableHandle]] = []  # a node lives no longer than who knows of it

    def step_ended(self, parameters: Callable[[], Mapping[str, Tensor]]) -> list[str]:
        """Return the parameters whose gradients were carried on since the last call, by name.

        parameters: returns those that are trained, by name.
        """
        carried = [
            name
            for name, values in self._found.items()
            if name not in self._clean and all(bool(value) for value in values)
        ]
        self.end()
        self._looks += 1
        self.is_looking = self._looks <= LOOKS and not carried
        if self.is_looking:
            self._begin(_some(parameters()))
        return carried

    def end(self) -> None:
        """Look no more."""
        for _, handle in self._hooked:
            handle.remove()
        self._hooked, self._found, self._clean = [], {}, set()

    def _begin(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            look = self._guard(partial(self._look, name, parameter))
            node = get_gradient_edge(parameter).node
            self._hooked.append((node, node.register_prehook(look)))

    def _look(self, name: str, parameter: Tensor, _: object) -> None:
        """A backward pass is about to add to a gradient."""
        gradient = parameter.grad
        if gradient is None:
            self._clean.add(name)
        elif gradient.layout == torch.strided and not (
            gradient.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            # Read once the step has ended: here it would hold up the pass.
            self._found.setdefault(name, []).append(gradient.detach().any())


def _some(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = [
        (name, one)
        for name, one in parameters.items()
        if one.requires_grad and one.is_leaf and parallel.is_plain(one) and one.numel()
    ]
    plain.sort(key=lambda pair: pair[1].numel())
    return dict(plain[:SMALLEST] + plain[SMALLEST:][-LARGEST:])
