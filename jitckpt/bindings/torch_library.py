"""libjitckpt_torch: what torch keeps of the device's memory that none of its tensors in Python show."""

import ctypes
from pathlib import Path
from typing import Any

_Extent = ctypes.c_uint64 * 2  # address and bytes
EXTENT_BYTES = ctypes.sizeof(_Extent)


def opened(path: Path) -> Any:
    """Return the library; its calls are made with Python's lock."""
    found = ctypes.PyDLL(str(path))
    found.jitckpt_torch_version.restype = ctypes.c_char_p
    found.jitckpt_torch_tell_proxy.restype = ctypes.c_char_p
    found.jitckpt_torch_buckets.restype = ctypes.c_int64
    found.jitckpt_torch_buckets.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int64)
    found.jitckpt_torch_steady_step.restype = ctypes.py_object
    found.jitckpt_torch_steady_step.argtypes = (
        *[ctypes.py_object] * 4,
        ctypes.c_char_p,
        *[ctypes.c_uint64] * 2,
        ctypes.c_int,
    )
    return found


class BucketExtents:
    """Asks for the buckets of a module's gradients, in room that it keeps."""

    def __init__(self, room: int) -> None:
        """room: for so many buckets, in the first try."""
        self._room = (_Extent * room)()

    def of(self, library: Any, reducer: object) -> bytes:
        """Return address and bytes of each, 64 bits each."""
        count: int = library.jitckpt_torch_buckets(reducer, self._room, len(self._room))
        if count > len(self._room):
            self._room = (_Extent * count)()
            return self.of(library, reducer)
        return ctypes.string_at(self._room, count * EXTENT_BYTES)
