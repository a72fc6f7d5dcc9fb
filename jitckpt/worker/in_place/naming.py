"""What lies where in a device's memory, in words: names of tensors for blocks that a validation speaks of."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from jitckpt.hooks.torch_steps import named_buffers
from jitckpt.state import parallel
from jitckpt.state.optimizer_state import parameters_of

BLOCK_BYTES = 512
MOST_NAMES = 40  # in one sentence
NOTHING = "nothing"


@dataclass(frozen=True)
class Places:
    """Pieces of memory by address, each with its length in bytes; their blocks are numbered through."""

    pieces: Sequence[tuple[int, int]]

    @cached_property
    def first_blocks(self) -> list[int]:
        """The number of each piece's first block."""
        found = [0]
        for _, size in self.pieces:
            found.append(found[-1] - (-size // BLOCK_BYTES))
        return found[:-1]

    def blocks(self, address: int, size: int) -> range:
        """Return the blocks of so many bytes; none where not all of it is memory of pieces."""
        place = bisect.bisect_right(self.pieces, address, key=lambda piece: piece[0]) - 1
        if place < 0 or size == 0:
            return range(0)
        last = place
        while (end := sum(self.pieces[last])) < address + size:
            last += 1
            if last == len(self.pieces) or self.pieces[last][0] != end:
                return range(0)
        return range(self._block(place, address), self._block(last, address + size - 1) + 1)

    def _block(self, place: int, address: int) -> int:
        return self.first_blocks[place] + (address - self.pieces[place][0]) // BLOCK_BYTES


def tensors(state: Mapping[str, Tensor], optimizers: Sequence[Optimizer | None]) -> dict[str, Tensor]:
    """Return all tensors that have names: a step's state, buffers, gradients, a GradScaler's."""
    found = dict(state)
    for number, optimizer in enumerate(optimizers):
        if optimizer is not None:
            for place, parameter in enumerate(parameters_of(optimizer)):
                if parameter.grad is not None:
                    found[f"optimizer.{number}.gradient.{place}"] = parameter.grad
    found |= named_buffers([*optimizers])
    for number, scaler in enumerate(parallel.all_of(GradScaler)):
        for name in ("_scale", "_growth_tracker"):
            if isinstance(tensor := getattr(scaler, name, None), Tensor):
                found[f"scaler.{number}.{name}"] = tensor
    return found


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's address, and the bytes from its first to its last element; 0, 0 without memory."""
    local = parallel.local(tensor)
    if not local.is_cuda or local.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return local.data_ptr(), (last + 1) * local.element_size()


def storage(tensor: Tensor) -> tuple[int, int]:
    """Return address and bytes of the storage that this rank's part of a tensor lies in; 0, 0 without one."""
    local = parallel.local(tensor)
    if not local.is_cuda or local.numel() == 0:
        return 0, 0
    own = local.untyped_storage()
    return own.data_ptr(), own.nbytes()


def described(blocks: Tensor, places: Places, named: Mapping[str, Tensor], most: int = MOST_NAMES) -> str:
    """Return what those blocks (bool, of all) belong to: names, and addresses of what has none."""
    names, nameless = [], blocks.clone()
    for name, tensor in named.items():
        own = places.blocks(*extent(tensor))
        if own and blocks[own.start : own.stop].any():
            names.append(name)
            nameless[own.start : own.stop] = False
    for (address, size), first in zip(places.pieces, places.first_blocks, strict=True):
        part = nameless[first : first - (-size // BLOCK_BYTES)].to(torch.int8)
        edge = torch.zeros(1, dtype=torch.int8, device="cpu")
        edges = torch.diff(part, prepend=edge, append=edge).nonzero().reshape(-1, 2)
        for begin, end in edges[: most + 1].tolist():
            names.append(f"{address + begin * BLOCK_BYTES:#x} ({(end - begin) * BLOCK_BYTES} bytes)")
    told = ", ".join(names[:most]) or NOTHING
    return f"{told} and more" if len(names) > most else told
