"""Which descriptors this process holds, so that a test sees what it left open."""

import gc
import os


def held_descriptors() -> set[str]:
    """Return the descriptors that are open, after all that was dropped before has been collected.

    A test asserts that it holds no more than before, not as much: a thread of an earlier test may
    close its own in the middle of it.
    """
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
