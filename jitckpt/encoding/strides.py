"""How tensors lie in memory: a file has all of them row by row, and a restart lays them out as they were.

It matters bit for bit: a fused kernel walks through memory as it lies, and which kernel a convolution takes
follows from its weights' strides (channels_last).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LARGEST_GAPS = 16  # times its elements that the memory which a tensor spans may be


def others_than_rows(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return, by name, the strides of those tensors that do not lie row by row."""
    return {
        name: list(tensor.stride())
        for name, tensor in tensors.items()
        if tensor.stride() != row_by_row(tensor.shape)
    }


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch makes them."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def laid_out(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a tensor of the same values, on the same device, that lies as `stride` says.

    An expanded tensor, or a narrow view of a large one, comes back as it is: nothing writes to it as it lies.
    Raises ValueError for what are no strides of this tensor.
    """
    if len(stride) != tensor.dim() or any(type(one) is not int or one < 0 for one in stride):
        raise ValueError(f"a tensor of {tensor.dim()} dimensions can't have the strides {stride!r:.80}")
    along = _along(tensor.shape, stride)
    span = 1 + sum((size - 1) * step for size, step in along)
    if not _are_apart(along) or span > LARGEST_GAPS * max(tensor.numel(), 1):
        return tensor
    result = torch.empty_strided(tuple(tensor.shape), tuple(stride), dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)


def all_laid_out(tensors: Mapping[str, Tensor], how: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the tensors of a save, of which `how` has the strides that others_than_rows returned."""
    return {**tensors, **{name: laid_out(tensors[name], how[name]) for name in how if name in tensors}}


def is_apart(tensor: Tensor) -> bool:
    """Whether no two elements of a tensor share memory, so that it can be written to."""
    return tensor.layout is torch.strided and _are_apart(_along(tensor.shape, tensor.stride()))


def _along(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    return [(size, step) for size, step in zip(shape, stride, strict=True) if size > 1]


def _are_apart(along: Sequence[tuple[int, int]]) -> bool:
    """Whether no two elements share memory: each dimension steps over all that the finer ones reach."""
    reach = 0
    for size, step in sorted(along, key=lambda one: one[1]):
        if step <= reach:
            return False
        reach += (size - 1) * step
    return True
