"""Sees when the training script takes a parameter's `data`: what it writes there torch does not count."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def watch(taken: Callable[[], None]) -> Callable[[], None]:
    """Call `taken` when the script takes `tensor.data` of a leaf that needs gradients; return what ends that.

    What torch itself takes (FSDP does in every pass) is its own, and is not told.
    """
    tensor_type: Any = torch.Tensor
    plain = tensor_type.data

    def get(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and tensor.is_leaf:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("torch."):
                taken()
        data: Tensor = plain.__get__(tensor)
        return data

    def put(tensor: Tensor, value: Tensor) -> None:
        plain.__set__(tensor, value)

    watched = property(get, put)
    tensor_type.data = watched

    def end() -> None:
        nonlocal taken
        taken = _nothing  # where somebody else has come to watch since, this stays inside of theirs
        if tensor_type.data is watched:
            tensor_type.data = plain

    return end


def _nothing() -> None:
    pass
