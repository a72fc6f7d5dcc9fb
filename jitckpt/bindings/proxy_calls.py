"""The types of the proxy's calls, which native/proxy/client/jitckpt_proxy.h declares, and of one of CUDA's.

`process`: the symbols of this process (bindings/symbols.py), or what a test has in their place.
"""

import ctypes
from typing import Any

from jitckpt.bindings.proxy_memory import Memory


def for_keeper(process: Any) -> None:
    """Declare what the keeper of minibatches calls."""
    process.cudaGetErrorString.restype = ctypes.c_char_p


def for_images(process: Any) -> None:
    """Declare what tells how the images are, and what they leave out."""
    process.jitckpt_proxy_given_up.restype = ctypes.c_char_p
    process.jitckpt_proxy_image_bytes.restype = ctypes.c_uint64
    process.jitckpt_proxy_leave_out.argtypes = (ctypes.c_void_p, ctypes.c_uint64)


def for_state(process: Any) -> None:
    """Declare what keeps the state on the device."""
    process.cudaGetErrorString.restype = ctypes.c_char_p
    process.jitckpt_proxy_answers.restype = ctypes.c_uint64
    process.jitckpt_proxy_step_ended.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
    process.jitckpt_proxy_step_begins.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    process.jitckpt_proxy_watch_state.argtypes = (ctypes.c_void_p, ctypes.c_uint64)


def check(process: Any, memory: Memory) -> int:
    """Have the minibatch's calls made again, and compare; return CUDA's error, 0 for none."""
    error: int = process.jitckpt_proxy_check(ctypes.byref(memory))
    return error


def validate(process: Any, place: int, what: int, *texts: bytes) -> int:
    """Tell the agent what this rank has come to; return what is heard."""
    heard: int = process.jitckpt_proxy_validate(ctypes.c_uint64(place), what, *texts)
    return heard
