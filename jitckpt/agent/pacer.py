"""What the agents know of how long snapshots and steps take, and so how often and fast those go."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jitckpt.decisions import memory_method, pace
from jitckpt.decisions.memory_method import ByTraffic

MOST_STRETCH = 4  # times as many steps as were measured, so that all goes in idle time


def of_whole_states(snapshot_seconds: float, step_seconds: float) -> ByTraffic:
    """Return how often a snapshot is made of which whole states are sent."""
    return memory_method.by_traffic(snapshot_seconds, step_seconds, (), (), may_be_gradients=False)


class Pacer:
    """For one start of the workers. rule: every so many steps, since a step; every 0 is not known yet.

    gradients: that is so as these are sent, in the place of whole states.
    """

    def __init__(
        self,
        every: int,
        choose: Callable[[float, float], ByTraffic] = of_whole_states,
        *,
        hosts: int = 1,
    ) -> None:
        """every: as the user has it; 0: as is found. choose: by the seconds of a snapshot, and of a step."""
        self._hosts = hosts
        self._carried: dict[int, tuple[int, str]] = {}  # by host, as IdleCarries has it
        self._is_by_idle = False
        self._least = 1  # every fewer steps a snapshot was left out
        self.rule, self.gradients = (every, 0), False
        self._choose = choose
        self._whole = 1  # every so many steps, of whole states
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
        if self.rule[0]:
            return self._by_idle_time(safe)
        done = sorted(seconds for step, seconds in self._seconds.items() if step <= safe)
        if len(done) < pace.PROFILED or not self._steps:
            return {}
        snapshot, step = done[len(done) // 2], min(self._steps)
        self._whole = of_whole_states(snapshot, step).every
        chosen = self._choose(snapshot, step)
        since = safe + pace.PROFILED_EVERY
        return {"every": chosen.every, "since": since, "why": chosen.text, "gradients": chosen.gradients}

    def idle_carries(self, host: int, every: int, why: str) -> None:
        """So many minibatches' idle time carries a host's snapshots: 0: no number of them does, any more."""
        self._carried[host] = every, why

    def _by_idle_time(self, safe: int) -> dict[str, Any]:
        """Return what all are to be told where the network's idle time carries another number of steps.

        That is the least for all hosts. Where it would be far more than was measured, it stays with that, as
        it does where idle spans do not carry a snapshot any more: then they go at a constant rate.
        """
        every, _ = self.rule
        if not self._finds_itself or self.gradients or len(self._carried) < self._hosts:
            return {}
        least, why = max(self._carried.values())
        by_idle = min(self._carried.values())[0] > 0 and least <= MOST_STRETCH * self._whole
        if not by_idle and not self._is_by_idle:
            return {}
        if not by_idle:
            least, why = (
                self._whole,
                "the network's idle time does not carry them, so they go beside the rest",
            )
        self._is_by_idle = by_idle
        wanted = max(least, self._least)
        if wanted == every:
            return {}
        often = "each step" if wanted == 1 else f"every {wanted} steps"
        text = f"a snapshot after {often} from now on, since {why}"
        return {"every": wanted, "since": safe + every, "why": text}

    def doubled(self, settled: int) -> dict[str, Any]:
        """Return what all are to be told as a snapshot was left out, if the rule is ours.

        Every rank tells of it: once is enough.
        """
        every, since = self.rule
        if not self._finds_itself or not every or settled < since:
            return {}
        if self.gradients:
            return self.without_gradients(settled, "a snapshot was not whole everywhere in time")
        self._least = twice = min(2 * every, pace.MOST_EVERY)
        why = f"a snapshot after every {twice} steps from now on, since one was not whole everywhere in time"
        return {"every": twice, "since": settled + every, "why": why}

    def without_gradients(self, heard: int, why: str) -> dict[str, Any]:
        """Return what all are to be told as whole states are sent again.

        heard: no rank makes a snapshot of a later step before it has heard what it is told now.
        """
        why = f"whole states from now on, after every {self._whole} steps, since {why}"
        return {"every": self._whole, "since": heard + 1, "why": why}

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
