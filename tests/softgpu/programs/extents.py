"""Asks where tensors of all kinds lie on a GPU, in C++ and in Python, and prints how many differ."""

import itertools
import struct

import torch

from jitckpt._seen import extents

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
leaf = torch.ones(7, device="cuda", requires_grad=True)
tensors = [*whole, *views, leaf, torch.ones(3), torch.ones(3, device="cuda").expand(2, 3)]
expected = [
    (tensor.data_ptr(), tensor.nbytes)
    for tensor in tensors
    if tensor.is_cuda and tensor.is_contiguous() and tensor.nbytes
]
found = [*struct.iter_unpack("=QQ", extents(tensors))]
print(len(expected) > 100, found == expected)
