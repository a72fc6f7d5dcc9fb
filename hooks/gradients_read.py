"""Sees gradients of the last step that a script reads once its loop has ended: no save holds them.

A restart there has none, where the script had some to log, to clip or to go on with. That a gradient is taken
tells nothing of what becomes of it, so those that are cleared first are nobody's affair.
"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import Tensor

CLEARS = "zero_grad"  # of modules and of optimizers, which read a gradient to clear it
CLIPS = "torch.nn.utils.clip_grad"


class GradientsRead:
    """Of one training; looks from `begins` until `ends`."""

    def __init__(self, is_scripts: Callable[[FrameType], bool], found: Callable[[str], None]) -> None:
        """is_scripts: whether a frame is of the script's own code. found: called once, with a name."""
        self._is_scripts, self._found = is_scripts, found
        self._names: dict[int, str] = {}  # of parameters with a gradient that a step has left, by id()
        self._watched: Any = None
        self._has_found = False

    def begins(self, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        """parameters: returns those that are trained, by name."""
        self.ends()
        if not self._has_found:
            self._names = {id(one): name for name, one in parameters().items() if one.grad is not None}
        if self._names:
            self._watch()

    def ends(self) -> None:
        """What comes now is none of its affairs."""
        tensor_type: Any = Tensor
        if self._watched is not None and vars(tensor_type).get("grad") is self._watched:
            del tensor_type.grad  # it is inherited
        self._watched = None
        self._names = {}

    def _watch(self) -> None:
        tensor_type: Any = Tensor
        if "grad" in vars(tensor_type):
            return  # somebody else looks, and would not know where to end
        plain = tensor_type.grad

        def get(tensor: Tensor) -> Tensor | None:
            if id(tensor) in self._names:
                self._look(tensor, sys._getframe(1))
            gradient: Tensor | None = plain.__get__(tensor)
            return gradient

        def put(tensor: Tensor, value: Tensor | None) -> None:
            self._names.pop(id(tensor), None)
            plain.__set__(tensor, value)

        def delete(tensor: Tensor) -> None:
            put(tensor, None)

        tensor_type.grad = self._watched = property(get, put, delete)

    def _look(self, tensor: Tensor, frame: FrameType) -> None:
        """Somebody takes a gradient that a step has left."""
        if frame.f_code.co_name == CLEARS:
            del self._names[id(tensor)]
        elif self._is_scripts(frame) or frame.f_globals.get("__name__") == CLIPS:
            name, self._has_found = self._names[id(tensor)], True
            self.ends()
            self._found(name)
