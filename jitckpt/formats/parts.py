"""A tensor of which several saves hold parts: where each begins, and the whole of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from jitckpt.errors import SaveError


@dataclass(frozen=True)
class Piece:
    """A part of a tensor. offsets: of its first element in the whole."""

    tensor: Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Parted:
    """A whole tensor in pieces, which do not overlap and leave no hole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def whole(self) -> Tensor:
        """Return it in memory of its own."""
        return self.part((0,) * len(self.shape), self.shape)

    def part(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the part that begins there and has this shape, in memory of its own; it lies inside."""
        result = torch.empty(tuple(shape), dtype=self.dtype, device="cpu")
        for piece in self.pieces:
            here, there = [], []
            for wanted, size, begin, has in zip(
                offsets, shape, piece.offsets, piece.tensor.shape, strict=True
            ):
                first, last = max(wanted, begin), min(wanted + size, begin + has)
                here.append(slice(first - wanted, max(first, last) - wanted))
                there.append(slice(first - begin, max(first, last) - begin))
            result[tuple(here)].copy_(piece.tensor[tuple(there)])
        return result


def joined(name: str, shape: Sequence[int], pieces: Sequence[Piece]) -> Parted:
    """Return the tensor that these pieces make; of equal ones, which replicas hold, one is taken.

    Raises SaveError if they don't make exactly the whole tensor.
    """
    if not pieces:
        raise SaveError(f"No save holds {name}.")
    distinct: dict[tuple[int, ...], Piece] = {}
    for piece in pieces:
        if piece.tensor.numel() or not prod(shape):
            known = distinct.setdefault(piece.offsets, piece)
            if known is not piece and not same(known.tensor, piece.tensor):
                raise SaveError(f"Two shards hold the same part of {name}, and differ in it.")
    found = tuple(distinct[offsets] for offsets in sorted(distinct))
    outside = any(
        begin + size > end
        for piece in found
        for begin, size, end in zip(piece.offsets, piece.tensor.shape, shape, strict=True)
    )
    if outside or sum(piece.tensor.numel() for piece in found) != prod(shape) or _overlap(found):
        raise SaveError(f"The shards' parts of {name} don't make a tensor of shape {list(shape)}.")
    if len({piece.tensor.dtype for piece in found}) > 1:
        raise SaveError(f"The shards' parts of {name} are of different types.")
    return Parted(tuple(shape), pieces[0].tensor.dtype, found)


def same(some: Tensor, other: Tensor) -> bool:
    """Return whether two tensors on the host are alike bit for bit."""
    if (some.shape, some.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bytes(some), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two pieces share an element, in a grid of the places where pieces begin.

    A piece that holds the beginning of another, in every dimension, overlaps it; and of two that overlap in
    any way, the point where the later begins in each dimension lies in both.
    """
    begins = [sorted({piece.offsets[axis] for piece in pieces}) for axis in range(len(pieces[0].offsets))]
    taken: set[tuple[int, ...]] = set()
    for piece in pieces:
        inside = [
            [place for place in axis if begin <= place < begin + size]
            for axis, begin, size in zip(begins, piece.offsets, piece.tensor.shape, strict=True)
        ]
        for point in product(*inside):
            if point in taken:
                return True
            taken.add(point)
    return False
