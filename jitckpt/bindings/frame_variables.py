"""Sets variables of a function that is running, from outside of it."""

import ctypes
import inspect
import sys
from collections.abc import Mapping
from types import FrameType


def set_variables(frame: FrameType, values: Mapping[str, object]) -> None:
    """Set the variables of these names, which the frame's code has.

    Before Python 3.13 a function's variables can only be read from outside; what was written to the dict of
    them is put into their places by a call of CPython's own, for debuggers (PEP 667, "The locals() builtin").
    """
    local = frame.f_locals
    local.update(values)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        local.clear()  # else it keeps all that is in it alive
