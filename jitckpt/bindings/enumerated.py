"""Sets what an `enumerate` counts with next, from outside of it."""

import ctypes
from typing import Any

from jitckpt.errors import JitckptError


def count_of(one: "enumerate[object]") -> int:
    """Return what it counts with next."""
    state: tuple[Any, ...] = one.__reduce__()  # type: ignore[assignment]
    _, (_, count) = state
    return int(count)


def set_count(one: "enumerate[object]", count: int) -> None:
    """Have it count with this number next, also where it asks for its next value right now.

    In every CPython so far the number is the first field behind an object's own.
    """
    field = ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__)
    if field.value != count_of(one):
        raise JitckptError(
            "This Python's enumerate does not count where it is known to: tell us its version."
        )
    field.value = count
