"""Which descriptors this process holds, so that a test sees what it left open."""

import gc
import os


def held_descriptors() -> set[str]:
    """Return the descriptors that are open, after all that was dropped before has been collected.

    Without that, what an earlier test left to the garbage collector is closed in the middle of a
    later one, which then seems to have closed too much.
    """
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
