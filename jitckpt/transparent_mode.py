"""Transparent mode in a worker: after every optimizer step the device proxy keeps what there is.

So far that is a copy of all memory of the device, from which the proxy replaces a server that has died.
"""

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jitckpt import proxy_faults
from jitckpt.hooks.torch_steps import OptimizerSteps

VARIABLE = "JITCKPT_MODE"  # "transparent" in the workers of `jitckpt run --mode transparent`


class MinibatchKeeper:
    """A listener to the steps of a script that knows nothing of it."""

    def __init__(self, process: Any) -> None:
        """process: the symbols of this process, as ctypes has them."""
        self._process = process
        self._process.cudaGetErrorString.restype = ctypes.c_char_p
        self._off = False

    def step_begins(self, step: int, state: Mapping[str, Tensor]) -> None:
        """The copy that was made after the last step holds all that this one needs."""

    def step_ended(self, step: int, state: Mapping[str, Tensor]) -> None:
        """A minibatch begins. If it can't be kept, transparent mode ends and training goes on."""
        if self._off:
            return
        error = self._process.jitckpt_proxy_keep()
        if error:
            self._off = True
            reason = self._process.cudaGetErrorString(error).decode()
            self._process.cudaGetLastError()  # else torch would take it for a failure of its own call
            text = f"transparent mode is switched off after step {step}: {reason}. The training goes on"
            print(f"jitckpt: {text}, but it ends if a device's server dies.", file=sys.stderr, flush=True)

    def unsupported(self, reason: str) -> None:
        """Nothing: with a copy of all memory it does not matter where in a step something changes."""


def begin() -> None:
    """Let the proxy, if this process has it, keep each minibatch that there will be."""
    process = ctypes.CDLL(None)
    if hasattr(process, "jitckpt_proxy_keep"):
        OptimizerSteps(MinibatchKeeper(process))
        proxy_faults.begin(process)
