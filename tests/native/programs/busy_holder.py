"""The GIL is held by a thread that is busy in the interpreter when a save is ordered.

Arguments: how; how many saves.
"""

import gc
import sys
import time
from typing import Any

from harness import Job, finish, progress, wait_for

OBJECTS = 1_500_000
DROPPED = 20_000
SORTED = 1_500_000


class Node:
    """In a cycle, so that only a collection finds it."""

    def __init__(self) -> None:
        self.cycle = [self]


def main() -> None:
    work, saves = sys.argv[1], int(sys.argv[2])
    unsorted = [float(number * 7919 % SORTED) for number in range(SORTED if work == "sort" else 0)]
    shared: list[float] = []
    cache: list[Any] = []
    saved: list[float] = []
    begun = 0.0

    def save(_: dict[str, Any]) -> None:
        """Let go of containers that a collection looks at, and have others made in their place."""
        cache.clear()
        cache.extend([float(number)] for number in range(DROPPED))
        shared.append(0.0)  # in the middle of a sort that would be an error
        saved.append(time.monotonic() - begun)

    job = Job(save)
    gc.disable()
    heap = [Node() for _ in range(OBJECTS)] if work == "collection" else []
    for number in range(saves):
        cache[:] = [[[number], {number: [number]}] for number in range(DROPPED)]
        begun = time.monotonic()
        job.order_save_later(number)
        while len(saved) <= number:
            if work == "collection":
                gc.collect()
            elif work == "sort":
                shared[:] = unsorted
                shared.sort()
            else:
                len(list(map(float, range(20_000_000))))
        wait_for(lambda: bool(progress().holding))
        job.order_resume()
        wait_for(lambda: not progress().holding)
    finish(saves=len(saved), heap=len(heap), dropped=len(cache))


main()
