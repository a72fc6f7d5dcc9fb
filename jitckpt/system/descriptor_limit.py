"""More descriptors for the agent: torch's store takes every connection, a stranger's too, in its process.

What the agent starts has the limit that the agent was started with.
"""

import contextlib
import resource

MOST = 1 << 16
_before: list[tuple[int, int]] = []  # the limits that this process was started with, if it has others now


def raise_limit() -> None:
    """Let this process have as many descriptors as it may, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _before[:] = [(soft, hard)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back(process: int) -> None:
    """Let a process that was started just now have what it would have without this."""
    with contextlib.suppress(ProcessLookupError):
        for limits in _before:
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
