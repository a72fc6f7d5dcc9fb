"""What the agents know of how long snapshots and steps take, and so how often and fast those go."""

from collections import defaultdict
from typing import Any

from jitckpt.decisions import pace


class Pacer:
    """For one start of the workers. rule: every so many steps, since a step; every 0 is not known yet."""

    def __init__(self, every: int) -> None:
        """every: as the user has it; 0: as is found."""
        self.rule = (every, 0)
        self._finds_itself = not every
        self._seconds: dict[int, float] = defaultdict(float)  # by step, until the last rank's was kept
        self._steps: list[float] = []
        self._share = pace.SHARE
        self._waited = 0.0

    def measured(self, step: int, seconds: float, step_seconds: float) -> None:
        """A rank's snapshot was kept so many seconds after it was begun; what a step takes there, or 0."""
        if self._finds_itself and not self.rule[0]:
            self._seconds[step] = max(self._seconds[step], seconds)
            if step_seconds > 0:
                self._steps.append(step_seconds)

    def planned(self, safe: int) -> dict[str, Any]:
        """Return what all hosts are to be told as a step is safe: the rule, once enough is measured."""
        done = sorted(seconds for step, seconds in self._seconds.items() if step <= safe)
        if self.rule[0] or len(done) < pace.PROFILED or not self._steps:
            return {}
        snapshot, step = done[len(done) // 2], min(self._steps)
        every = pace.steps_between(snapshot, step)
        often = "each step" if every == 1 else f"every {every} steps"
        why = (
            f"a snapshot after {often}, since one takes {snapshot:.3g} s beside the training until it is "
            f"whole everywhere, and a step {step:.3g} s"
        )
        return {"every": every, "since": safe + pace.PROFILED_EVERY, "why": why}

    def doubled(self, settled: int) -> dict[str, Any]:
        """Return what all are to be told as a snapshot was left out, if the rule is ours.

        Every rank tells of it: once is enough.
        """
        every, since = self.rule
        if not self._finds_itself or not every or settled < since:
            return {}
        twice = min(2 * every, pace.MOST_EVERY)
        why = f"a snapshot after every {twice} steps from now on, since one was not whole everywhere in time"
        return {"every": twice, "since": settled + every, "why": why}

    def noticed(self, between: float) -> float:
        """Return from how many seconds on a wait of the training counts."""
        return pace.NOTICED * between

    def spare(self, between: float) -> float:
        """Return how long a snapshot may make way for the training, behind that rate."""
        return pace.MAKES_WAY * between

    def rate(self, size: int, copied: float, between: float, waited: float) -> float:
        """Return the bytes per second at which a snapshot of this host's ranks is to be sent.

        waited: seconds, by the training for snapshots so far.
        """
        self._share = pace.next_share(self._share, waited - self._waited, between)
        self._waited = waited
        return pace.rate(size, copied, between, self._share)
