"""What saves need of the device proxy, where the device lies behind one (docs/how-it-works/proxy.md)."""

import ctypes
from enum import Enum
from functools import cache
from typing import Any

from jitckpt.errors import NativeError


class DeviceStanding(Enum):
    """Whether the device is where the program's calls and events say; as in jitckpt_proxy.h."""

    INTACT = 0
    RECOVERS = 1  # nobody can tell before the recovery is over
    LOST = 2  # it was brought back, and has not ended a minibatch since; or it never will


@cache
def _proxy() -> Any:
    """Return the symbols of this process; None if there is no proxy among its libraries."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "jitckpt_proxy_share") else None


def is_there() -> bool:
    """Return whether this process's device lies behind a proxy."""
    return _proxy() is not None


def share(descriptor: int, offset: int, size: int) -> int:
    """Return where a part of a file is page-locked memory of this process; offset and size: whole pages.

    Raises NativeError.
    """
    address = ctypes.c_void_p()
    error = _proxy().jitckpt_proxy_share(
        descriptor, ctypes.c_uint64(offset), ctypes.c_uint64(size), ctypes.byref(address)
    )
    if error or address.value is None:
        raise NativeError(
            f"The device proxy's server can't map {size} bytes of this rank's state (CUDA error {error})."
        )
    return address.value


def shared(descriptor: int, offset: int, size: int) -> memoryview:
    """Return such a part as memory. Raises NativeError."""
    return memoryview((ctypes.c_uint8 * size).from_address(share(descriptor, offset, size)))


def standing() -> DeviceStanding:
    """Return how the device stands; without a proxy it is where it is."""
    return DeviceStanding(_proxy().jitckpt_proxy_stands()) if is_there() else DeviceStanding.INTACT
