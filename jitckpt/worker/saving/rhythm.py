"""After which steps a rank makes a snapshot for the memory tier: all ranks after the same.

The agents say it, and change it: from a step on that no rank has come to, since each first waits until it has
heard that its last snapshot is settled, and hears of the change before that.
"""

import time
from collections import deque

from jitckpt.decisions.pace import PROFILED_EVERY, unpacked
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import RULE, STEP_TIME

TIMED_STEPS = 8


class Rhythm:
    """Tells when a snapshot is due, and the agent how long a step takes."""

    def __init__(self, descriptor: int, every: int) -> None:
        """every: steps; 0: as the agent will say, until then every PROFILED_EVERY from the first on."""
        self._memory = descriptor
        self._every, self._since = (every, 0) if every else (PROFILED_EVERY, 1)
        self._ends: deque[tuple[int, float]] = deque(maxlen=TIMED_STEPS + 1)
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """The training has waited for a snapshot, which is no part of its steps."""
        self._waited += seconds

    def is_due(self, step: int) -> bool:
        """Return whether the state after this step is wanted; to be asked after each."""
        self._time(step)
        every, since = unpacked(host_memory.word(self._memory, RULE))
        if every and step > since:
            self._every, self._since = every, since
        return (step - self._since) % self._every == 0

    @property
    def seconds_between(self) -> float:
        """How long it is from one snapshot to the next; 0: not known yet."""
        return self._every * host_memory.word(self._memory, STEP_TIME) / 1e6

    def _time(self, step: int) -> None:
        if self._ends and self._ends[-1][0] >= step:
            return
        self._ends.append((step, time.monotonic() - self._waited))
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        if last > first:
            microseconds = max(1, int((ended - began) / (last - first) * 1e6))
            host_memory.put_word(self._memory, STEP_TIME, microseconds)
