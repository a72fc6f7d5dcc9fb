"""The symbols of this process: of its program and of all libraries that it has loaded."""

import ctypes
from typing import Any


class _Found(ctypes.Structure):
    """Dl_info of <dlfcn.h>."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def with_name(name: str) -> Any:
    """Return the symbols of this process, to be called; None if none of them has this name."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, name) else None


def is_in(name: str, library: str) -> bool:
    """Return whether a call by this name reaches the library with this file name first."""
    process = with_name(name)
    if process is None:
        return False
    found = _Found()
    process.dladdr(ctypes.cast(getattr(process, name), ctypes.c_void_p), ctypes.byref(found))
    return found.file is not None and found.file.endswith(b"/" + library.encode())
