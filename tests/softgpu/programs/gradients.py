"""Asks where gradients of all kinds lie on a GPU, and prints whether Python says the same."""

import itertools
import struct
from types import SimpleNamespace
from typing import Any

import torch

from jitckpt._seen import gradients

whole = [
    torch.empty(shape, dtype=dtype, device=f"cuda:{device}")
    for shape in ((), (0,), (1,), (5,), (2, 3), (3, 1), (4, 0, 2), (2, 1, 3, 5))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    for device in (0, 1)
]
views = [
    view
    for tensor in whole
    for order in itertools.permutations(range(tensor.dim()))
    for view in (tensor.permute(order), tensor.permute(order)[1:] if order else tensor)
]
tensors = [*whole, *views, torch.ones(3), torch.ones(3, device="cuda").expand(2, 3)]
expected = [
    (tensor.data_ptr(), tensor.nbytes)
    for tensor in tensors
    if tensor.is_cuda and tensor.is_contiguous() and tensor.nbytes
]
# A parameter would want a gradient of its own type and shape.
parameters: list[Any] = [SimpleNamespace(grad=tensor) for tensor in [*tensors, None]]
found = [*struct.iter_unpack("=QQ", gradients(parameters, torch.Tensor) or b"")]
print(len(expected) > 100, found == expected)
