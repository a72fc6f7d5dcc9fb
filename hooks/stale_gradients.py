"""Sees optimizer steps that go by a gradient which an earlier minibatch has left: no save has its values.

So it is of a parameter that is frozen, or not used any more, where a script clears the gradients of others
alone. It may begin at any time: so it is looked for in the first steps, as parameters are frozen, and now and
then.
"""

import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from jitckpt.hooks import captured_graphs
from jitckpt.state import parallel

FIRST_LOOKS, LOOKS = 3, 2
EVERY = 1000  # steps: each parameter that is looked at takes about a microsecond
MOST = 5  # of those that are named


class _Left(NamedTuple):
    """How a step has left a parameter and its gradient."""

    gradient: "weakref.ref[Tensor]"
    writes: int  # to the gradient
    steps: int  # writes to the parameter


class StaleGradients:
    """Of one training, from its first step on."""

    def __init__(self) -> None:
        self._looks, self._steps = FIRST_LOOKS, 0
        self._left: dict[str, _Left] = {}
        self._replays = 0  # of graphs, as the newest step ended

    def step_ended(self, parameters: Callable[[], Mapping[str, Tensor]], *, is_changed: bool) -> list[str]:
        """Return some of the parameters that this step and the one before have moved by the same gradient.

        parameters: returns those that are trained, by name. is_changed: of them others are frozen now.
        """
        self._steps += 1
        if is_changed or self._steps % EVERY == 0:
            self._looks = max(self._looks, LOOKS)
        if not self._looks:
            return []
        self._looks -= 1
        before, self._left = self._left, {}
        replays, self._replays = self._replays, captured_graphs.replays()
        if replays != self._replays:
            before = {}  # a graph writes gradients anew, and leaves no sign of it
        now = parameters()
        stale = [*islice((name for name, one in now.items() if _is_stale(before.get(name), one)), MOST)]
        if self._looks:
            for name, one in now.items():
                if (gradient := one.grad) is not None:
                    self._left[name] = _Left(weakref.ref(gradient), gradient._version, one._version)
        return stale


def _is_stale(left: _Left | None, parameter: Tensor) -> bool:
    gradient = parameter.grad
    if left is None or gradient is None or left.gradient() is not gradient:
        return False
    if parameter._version == left.steps:
        return False  # its optimizer has made no step
    if gradient._version != left.writes and parameter.requires_grad:
        return False  # a backward pass has added to it; to a frozen one's none does
    own = parallel.local(gradient)
    if own.layout != torch.strided or (own.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(own.any())
