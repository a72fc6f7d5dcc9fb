"""Has the training's thread wait where a save can hold it."""

import time
from collections.abc import Callable

import torch

LOOK_SECONDS = 0.001


def wait_in_device_calls(device: torch.device | None, is_over: Callable[[], bool], until: float) -> bool:
    """Wait in calls of the device, so that a save after a failure finds this thread held like any other.

    Returns whether it is over, or else it was until then (time.monotonic()).
    """
    while not is_over():
        if time.monotonic() > until:
            return False
        torch.cuda.current_stream(device).query()
        time.sleep(LOOK_SECONDS)
    return True


def hold_in_device_calls(device: torch.device | None, seconds: float) -> None:
    """Wait for so long, in the same way."""
    wait_in_device_calls(device, lambda: False, time.monotonic() + seconds)
