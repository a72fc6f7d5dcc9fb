"""Reads and sets variables of a function that is running, from outside of it."""

import ctypes
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

# Before Python 3.13 a function's frame has a dict of its variables once it was asked for them, which is what
# `locals()` returns (PEP 667). Where it has that: at _F_FRAME its inner part, and in this, by versions, the
# dict (Include/internal/pycore_frame.h).
_F_FRAME = object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)
_F_LOCALS = {(3, 11): 24, (3, 12): 40}


def own_variables(frame: FrameType) -> dict[str, Any]:
    """Return what a frame's own variables are, and leave nothing of them with the frame.

    Else the outputs of one minibatch would stay in the device's memory as long as the loop runs. What the
    script has got from `locals()` stays as it is.
    """
    if not _has_dict(frame):
        return {**frame.f_locals}
    before = {**_dict_of(frame)}
    local = frame.f_locals
    variables = {**local}
    _leave(local, before)
    return variables


def set_variables(frame: FrameType, values: Mapping[str, object]) -> None:
    """Set the variables of these names, which the frame's code has.

    Before Python 3.13 a function's variables can only be read from outside; what was written to the dict of
    them is put into their places by a call of CPython's own, for debuggers (PEP 667, "The locals() builtin").
    """
    if not _has_dict(frame):
        frame.f_locals.update(values)
        return
    before = {**_dict_of(frame)}
    local = frame.f_locals
    local.update(values)
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    _leave(local, before)


def _has_dict(frame: FrameType) -> bool:
    return sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _dict_of(frame: FrameType) -> dict[str, Any]:
    """Return the dict that a function's frame has by now, as it is; asked for it, the frame would fill it."""
    inner = ctypes.c_void_p.from_address(id(frame) + _F_FRAME).value or 0
    of_version = _F_LOCALS[sys.version_info[:2]]
    found = ctypes.c_void_p.from_address(inner + of_version)
    return ctypes.cast(found, ctypes.py_object).value if found else {}


def _leave(local: dict[str, Any], before: Mapping[str, Any]) -> None:
    local.clear()
    local.update(before)
