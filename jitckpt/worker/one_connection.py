"""A setting of CUDA's that keeps copies waiting for each other."""

from collections.abc import Callable, Mapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
ONE_CONNECTION = (
    f"{VARIABLE} is 1: all streams of a device share one queue, so where a collective never ends, after a "
    "failure of another rank too, no copy gets past what waits for it, and the state may not be saved. If "
    "your program works without the variable, unset it; else save now and then (save_every)."
)


def warn_of_it(world_size: int, environment: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """With 1, a copy on any stream waited behind one on a stream that hung (seen: docs/guides/gpu.md)."""
    if world_size > 1 and environment.get(VARIABLE) == "1":
        warn(ONE_CONNECTION)
