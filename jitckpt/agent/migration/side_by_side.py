"""What CRIU does for several ranks at the same time: their trees of processes have nothing in common.

As many at a time as there are cores, and, where images go into memory, as fit there.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from jitckpt.bindings.criu import CriuError
from jitckpt.errors import JitckptError

Failure = JitckptError | OSError

Rank = TypeVar("Rank")
Value = TypeVar("Value")


def side_by_side(calls: Sequence[Callable[[], Value]]) -> list[Value | Failure]:
    """Return what each call returns, or why it failed; all are made, and have ended."""
    if not calls:
        return []
    with ThreadPoolExecutor(min(len(calls), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(_tried, calls))


def _tried(call: Callable[[], Value]) -> Value | Failure:
    try:
        return call()
    except (JitckptError, OSError) as error:
        return error


def all_of(found: Sequence[Value | Failure]) -> list[Value]:
    """Return what all calls have returned. Raises the first failure."""
    values = []
    for one in found:
        if isinstance(one, JitckptError | OSError):
            raise one
        values.append(one)
    return values


def made_again(
    ranks: Sequence[Rank], make: Callable[[Rank], Value], end: Callable[[Rank], None]
) -> list[Value | Failure]:
    """Make ranks again; one that can't be is ended, and tried once more, alone.

    Of those that were forked of one process, files without a name may be in each other's way.
    """
    found = side_by_side([partial(make, one) for one in ranks])
    for number, one in enumerate(ranks):
        if isinstance(found[number], CriuError):
            end(one)
            found[number] = _tried(partial(make, one))
    return found


def fitting(needed: Mapping[int, int], free: int) -> list[list[int]]:
    """Part ranks, of which each needs so much memory for images, so that those of each part fit.

    Once a part is images, its processes have given back as much.
    """
    parts: list[list[int]] = []
    left = 0
    for rank, size in needed.items():
        if not parts or size > left:
            parts.append([])
            left = free
        parts[-1].append(rank)
        left -= size
    return parts
