"""Memory of the device as the proxy's client speaks of it: see native/proxy/client/jitckpt_proxy.h."""

import ctypes

import torch
from torch import Tensor


class Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class Memory(ctypes.Structure):
    """What a check has seen, in blocks."""

    _fields_ = (
        ("place_count", ctypes.c_uint64),
        ("places", ctypes.POINTER(Extent)),
        ("block_count", ctypes.c_uint64),
        ("changed", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
    )

    def pieces(self) -> list[tuple[int, int]]:
        """Return address and length of each piece of memory that was looked at."""
        return [(one.address, one.bytes) for one in self.places[: self.place_count]]

    def bytes_at(self, address: int) -> Tensor:
        """Return the bytes of all blocks that lie there, not copied."""
        if self.block_count == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        content = (ctypes.c_uint8 * self.block_count).from_address(address)
        return torch.frombuffer(content, dtype=torch.uint8)
