"""Torch's deterministic algorithms for one minibatch that is validated, where the user wants that.

Afterwards all is as the program had it. What it has changed meanwhile stays as it is.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

# What cuBLAS needs to have from the beginning, if the user says nothing else.
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

_WARN = 1  # of torch's modes; unlike torch.use_deterministic_algorithms it brings no compiler in
_Setting = tuple[Callable[[], Any], Callable[[Any], None], Any]


def _of(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda to: setattr(owner, name, to)


# How each is read and set, and what it is set to. Memory that torch gives out is not filled: that would be
# more work, and hide what reads it too early.
_SETTINGS: Sequence[_Setting] = (
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, _WARN),
    (*_of(torch.backends.cudnn, "deterministic"), True),
    (*_of(torch.utils.deterministic, "fill_uninitialized_memory"), False),
)


class DeterministicMinibatch:
    """Used by the thread that makes the steps."""

    def __init__(self) -> None:
        self._before: list[tuple[_Setting, Any]] = []
        # What torch says of an operator without such an algorithm must end no training (python -W error).
        warnings.filterwarnings("default", message=".*deterministic")

    def begin(self) -> None:
        """Have what is called from here on use them, unless the program has them already."""
        if self._before or torch.get_deterministic_debug_mode():
            return
        for setting in _SETTINGS:
            get, change, to = setting
            self._before.append((setting, get()))
            change(to)

    def end(self) -> None:
        """Put back what the program had. May be called where nothing has begun."""
        before, self._before = self._before, []
        for (get, change, to), value in before:
            if get() == to:
                change(value)
