"""Sees when a program takes a parameter's `data`: what it writes there torch does not count."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def watch(taken: Callable[[], None]) -> None:
    """Call `taken` before each `tensor.data` of a leaf that needs gradients, from now on."""
    plain: Any = torch.Tensor.data

    def get(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and tensor.is_leaf:
            taken()
        data: Tensor = plain.__get__(tensor)
        return data

    def put(tensor: Tensor, value: Tensor) -> None:
        plain.__set__(tensor, value)

    torch.Tensor.data = property(get, put)  # type: ignore[assignment]
