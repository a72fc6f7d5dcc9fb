"""Finds out when in a minibatch the network is idle, and tells the agent, which sends snapshots then.

While it sends, another thread says whether the network is used right now. When the device is idle is found
out by the same measurement; it says where in the minibatch a snapshot leaves the device.

The preloaded library has the device take the time of each collective, and of what the training's stream comes
to, in some minibatches; profiled are those of the beginning, and again now and then, as it may change.
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
    has_drifted,
    idle,
)
from jitckpt.decisions.snapshot_spans import Mark, Profiled, Timeline, timeline
from jitckpt.tiers import host_memory
from jitckpt.tiers import idle as idle_profile

LOOK_SECONDS = 0.1
LAST_SECONDS = 1.0  # for what a thread is in the middle of
FIRST_MINIBATCHES = 3  # which take longer than the others
_told: list[Tensor] = []  # memory that the device writes to stays mapped until the process ends


class NetworkProfiler(threading.Thread):
    """For one job of this process, from its restore on."""

    def __init__(
        self,
        native: Native,
        descriptor: int,
        warn: Callable[[str], None],
        *,
        sends: bool,
        found: Callable[[Timeline | None], None] | None,
    ) -> None:
        """descriptor: of the memory that the agent has given for snapshots. sends: it sends them to others.

        found: is told what a minibatch is like, and None where nobody knows any more.
        """
        super().__init__(name="jitckpt-network", daemon=True)
        self._native, self._memory, self._warn = native, descriptor, warn
        self._sends, self._found = sends, found
        self._use: threading.Thread | None = None
        self._stopping = threading.Event()
        self._ends = torch.zeros(1, dtype=torch.int64, device="cpu")

    def run(self) -> None:
        """Measure until it is stopped. What fails here costs the profile, and nothing else."""
        try:
            if self._sends:
                self._tell_now()
            self._measure()
        except Exception as error:
            self._warn(
                f"When the network is idle could not be measured ({error!r}): the memory tier sends at a "
                "constant rate."
            )

    def _tell_now(self) -> None:
        """Have the device say when a minibatch begins, and when it uses the network."""
        page = torch.frombuffer(mmap.mmap(self._memory, host_memory.PAGE), dtype=torch.uint8)
        _told.append(page)
        self._use = threading.Thread(
            target=self._tell_use, args=(page,), name="jitckpt-network-use", daemon=True
        )
        self._use.start()
        self._native.tell_step_time(page.data_ptr() + host_memory.MINIBATCH)

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
        told: Timeline | None = None
        wait = FIRST_MINIBATCHES
        while (profiled := self._profiled(after=wait)) is not None:
            wait = PROFILED_AGAIN
            found = idle([(one.seconds, [*one.collectives, *one.exchanges]) for one in profiled])
            if self._sends and found is not None and _is_news(planned, found):
                number, planned = number + 1, found
                idle_profile.put(self._memory, number, found)
            if self._found is not None:
                now = timeline(profiled)
                if told is None or now is None or told.has_drifted(now, PROFILED_MINIBATCHES):
                    told = now
                self._found(told)

    def _profiled(self, after: int) -> list[Profiled] | None:
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


def minibatches_in(numbers: list[float]) -> list[Profiled]:
    """Return what jitckpt_network_profile has written."""
    found: list[Profiled] = []
    rest = iter(numbers)
    for seconds in rest:
        one = Profiled(seconds, [], [], [])
        for _ in range(int(next(rest))):
            begin, end, is_exchange = next(rest), next(rest), next(rest)
            (one.exchanges if is_exchange else one.collectives).append((begin, end))
        one.points.extend((next(rest), Mark(int(next(rest)))) for _ in range(int(next(rest))))
        found.append(one)
    return found


def _is_news(planned: Idle | None, found: Idle) -> bool:
    return planned is None or has_drifted(planned.spans, found.spans, PROFILED_MINIBATCHES)
