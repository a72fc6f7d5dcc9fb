"""First-order cost of the ways to protect a job: the papers' closed forms.

Sources: "Just-In-Time Checkpointing" (EuroSys '24), section 5, and "GEMINI" (SOSP '23), section 2.
They count every failure alone (none during a recovery); `jitckpt.planning.exact` does not.
"""

import math
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput, number, positive, whole
from jitckpt.planning.units import DAY_SECONDS, MONTH_DAYS


@dataclass(frozen=True)
class JobCosts:
    """What section 5 needs to know of a job (the paper's letters in brackets)."""

    gpus: int  # N
    failures_per_gpu_day: float  # f
    save_seconds: float  # o: all GPUs stand still for one save
    restore_seconds: float  # r: fixed cost of a recovery
    minibatch_seconds: float = 0.0  # m
    overhead_share: float = 0.0  # o_jit: lost time per useful time while nothing fails

    def __post_init__(self) -> None:
        whole("gpus", self.gpus, low=1)
        for name in (
            "failures_per_gpu_day", "save_seconds", "restore_seconds", "minibatch_seconds", "overhead_share",
        ):  # fmt: skip
            number(name, getattr(self, name))

    @property
    def failures_per_second(self) -> float:
        """Of the whole job: any GPU's failure stops all (N f)."""
        return self.gpus * self.failures_per_gpu_day / DAY_SECONDS


@dataclass(frozen=True)
class Waste:
    """Wasted time per GPU and useful second, by cause."""

    saving: float
    restoring: float
    redoing: float
    overhead: float

    @property
    def per_useful_second(self) -> float:
        return self.saving + self.restoring + self.redoing + self.overhead

    @property
    def share(self) -> float:
        """Of all time, useful and wasted (eq. 6); 1 when the job never gets anywhere."""
        w = self.per_useful_second
        return 1.0 if math.isinf(w) else w / (1 + w)


def optimal_saves_per_second(job: JobCosts) -> float:
    """Eq. 3: c* = sqrt(N f / 2 o). Infinite when a save costs nothing and failures happen."""
    if job.failures_per_second == 0:
        return 0.0
    if job.save_seconds == 0:
        return math.inf
    return math.sqrt(job.failures_per_second / (2 * job.save_seconds))


def periodic_waste(job: JobCosts, saves_per_second: float | None = None) -> Waste:
    """Eq. 1: c o + N f r + N f / 2 c, at the optimal frequency unless one is given."""
    c = optimal_saves_per_second(job) if saves_per_second is None else saves_per_second
    if saves_per_second is not None:
        number("saves_per_second", saves_per_second)
    failures = job.failures_per_second
    return Waste(
        saving=0.0 if job.save_seconds == 0 else c * job.save_seconds,
        restoring=failures * job.restore_seconds,
        redoing=0.0 if failures == 0 else math.inf if c == 0 else failures / (2 * c),
        overhead=0.0,
    )


def user_level_jit_waste(job: JobCosts) -> Waste:
    """Eq. 7 as printed: f o + o_jit + N f (r + m / 2).

    It charges a save once a failure (f o), although all GPUs stand still for it (N f o); `plan` and
    `simulate` charge all.
    """
    return Waste(
        saving=job.failures_per_gpu_day / DAY_SECONDS * job.save_seconds,
        restoring=job.failures_per_second * job.restore_seconds,
        redoing=job.failures_per_second * job.minibatch_seconds / 2,
        overhead=job.overhead_share,
    )


def transparent_jit_waste(job: JobCosts) -> Waste:
    """Eq. 8, transient errors: o_jit + N f m / 2."""
    return Waste(0.0, 0.0, job.failures_per_second * job.minibatch_seconds / 2, job.overhead_share)


def average_wasted_seconds(
    checkpoint_seconds: float, interval_seconds: float, retrieval_seconds: float
) -> float:
    """GEMINI, eq. 1: what one failure wastes, t_ckpt + 1 / 2 F + t_retrieve; raises if eq. 2 forbids it."""
    number("checkpoint_seconds", checkpoint_seconds)
    number("retrieval_seconds", retrieval_seconds)
    if number("interval_seconds", interval_seconds) < checkpoint_seconds:
        raise InvalidInput(
            f"interval_seconds is {interval_seconds!r}: a checkpoint takes {checkpoint_seconds!r} s, "
            "and the next cannot begin before it ends"
        )
    return checkpoint_seconds + interval_seconds / 2 + retrieval_seconds


def shortest_interval_seconds(checkpoint_seconds: float, iteration_seconds: float) -> float:
    """GEMINI, eq. 2, in whole iterations (its HighFreq): the smallest interval that holds a checkpoint."""
    number("checkpoint_seconds", checkpoint_seconds)
    positive("iteration_seconds", iteration_seconds)
    return max(1, math.ceil(checkpoint_seconds / iteration_seconds)) * iteration_seconds


def money_per_month(gpus: int, wasted_share: float, price_per_gpu_hour: float) -> float:
    """What the wasted share of a month (30 days) of all GPUs costs, in the price's currency."""
    whole("gpus", gpus, low=1)
    number("wasted_share", wasted_share, high=1.0)
    return gpus * wasted_share * MONTH_DAYS * 24 * number("price_per_gpu_hour", price_per_gpu_hour)
