"""Tensors on the device are gathered into one before they are copied to a ring."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitckpt.ring.format import aligned


class Gathering:
    """One flat tensor on the device, into which all tensors are gathered before one copy to the host."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._shapes: list[tuple[str, torch.dtype, torch.Size]] = []
        self._entries: dict[str, tuple[str, list[int], int]] = {}
        self._views: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        self._flat: Tensor | None = None
        self._last_stream: torch.cuda.Stream | None = None

    def arrange(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int], int]]:
        """Return where each tensor comes to lie: its type, shape and offset."""
        shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if shapes != self._shapes:
            self._shapes, self._entries, self._views = shapes, {}, {}
            self.device = next(iter(tensors.values())).device
            self._flat = None
            offset = 0
            for name, tensor in tensors.items():
                self._entries[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
                offset += aligned(tensor.nbytes)
        return self._entries

    def gather(self, tensors: list[Tensor]) -> tuple[int, int]:
        """Return where to copy how many bytes from."""
        if self._flat is None:
            self._flat = self._gathering(tensors)
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)  # the flat tensor is still being read there
        self._last_stream = stream
        for indices, views in self._views.values():
            torch._foreach_copy_(views, [tensors[index] for index in indices])
        return self._flat.data_ptr(), self._flat.nbytes

    def _gathering(self, tensors: list[Tensor]) -> Tensor:
        """Return a new flat tensor, with a view for each of the others."""
        size = sum(aligned(tensor.nbytes) for tensor in tensors)
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        for index, (tensor, (_, _, offset)) in enumerate(zip(tensors, self._entries.values(), strict=True)):
            view = flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            indices, views = self._views.setdefault(tensor.dtype, ([], []))
            indices.append(index)
            views.append(view)
        return flat
