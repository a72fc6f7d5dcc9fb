"""Finds out when in a minibatch the network is idle, and tells the agent, which sends snapshots then.

While it sends, another thread says whether the network is used right now.

The preloaded library has the device take the time of each collective, in some minibatches; profiled are those
of the beginning, and again now and then, as it may change.
"""

import mmap
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from jitckpt.bindings.interpose import Native
from jitckpt.decisions.idle_time import (
    PROFILED_AGAIN,
    PROFILED_MINIBATCHES,
    Idle,
    Minibatch,
    has_drifted,
    idle,
)
from jitckpt.tiers import host_memory
from jitckpt.tiers import idle as idle_profile

LOOK_SECONDS = 0.1
LAST_SECONDS = 1.0  # for what a thread is in the middle of
FIRST_MINIBATCHES = 3  # which take longer than the others
_told: list[Tensor] = []  # memory that the device writes to stays mapped until the process ends


class NetworkProfiler(threading.Thread):
    """For one job of this process, from its restore on."""

    def __init__(self, native: Native, descriptor: int, warn: Callable[[str], None]) -> None:
        """descriptor: of the memory that the agent has given for snapshots."""
        super().__init__(name="jitckpt-network", daemon=True)
        self._native, self._memory, self._warn = native, descriptor, warn
        self._use: threading.Thread | None = None
        self._stopping = threading.Event()
        self._ends = torch.zeros(1, dtype=torch.int64, device="cpu")

    def run(self) -> None:
        """Measure until it is stopped. What fails here costs the profile, and nothing else."""
        try:
            page = torch.frombuffer(mmap.mmap(self._memory, host_memory.PAGE), dtype=torch.uint8)
            _told.append(page)
            self._use = threading.Thread(
                target=self._tell_use, args=(page,), name="jitckpt-network-use", daemon=True
            )
            self._use.start()
            self._native.tell_step_time(page.data_ptr() + host_memory.MINIBATCH)
            self._measure()
        except Exception as error:
            self._warn(
                f"When the network is idle could not be measured ({error!r}): the memory tier sends at a "
                "constant rate."
            )

    def stop(self) -> None:
        self._stopping.set()
        self._ends[0] = 1
        self.join(LAST_SECONDS)
        if self._use is not None:
            self._use.join(LAST_SECONDS)
        self._native.tell_step_time(0)
        self._native.profile_network(0)

    def _tell_use(self, page: Tensor) -> None:
        words = page.data_ptr()
        ends = self._ends.data_ptr()
        self._native.tell_network_use(words + host_memory.SENDING, words + host_memory.NETWORK_USED, ends)

    def _measure(self) -> None:
        number, planned = 0, None
        wait = FIRST_MINIBATCHES
        while (profiled := self._profiled(after=wait)) is not None:
            wait = PROFILED_AGAIN
            found = idle(profiled)
            if found is not None and _is_news(planned, found):
                number, planned = number + 1, found
                idle_profile.put(self._memory, number, found)

    def _profiled(self, after: int) -> list[Minibatch] | None:
        """Profile, after so many minibatches from now; None if it is stopped."""
        first = self._native.progress().device_ended + after
        while self._native.progress().device_ended < first:
            if self._stopping.wait(LOOK_SECONDS):
                return None
        self._native.profile_network(PROFILED_MINIBATCHES)
        while not (numbers := self._native.network_profile()):
            if self._stopping.wait(LOOK_SECONDS):
                return None
        return minibatches_in(numbers)


def minibatches_in(numbers: list[float]) -> list[Minibatch]:
    """Return what jitckpt_network_profile has written."""
    found: list[Minibatch] = []
    place = 0
    while place < len(numbers):
        seconds, count = numbers[place], int(numbers[place + 1])
        times = numbers[place + 2 : place + 2 + 2 * count]
        found.append((seconds, list(zip(times[::2], times[1::2], strict=True))))
        place += 2 + 2 * count
    return found


def _is_news(planned: Idle | None, found: Idle) -> bool:
    return planned is None or has_drifted(planned, found, PROFILED_MINIBATCHES)
