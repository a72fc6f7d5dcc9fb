"""How long checkpoints in memory survive node losses (REFT, section 5): Weibull times to failure."""

import math
from dataclasses import dataclass

import numpy as np

from jitckpt.decisions.check import InvalidInput, number, positive, whole


@dataclass(frozen=True)
class Weibull:
    """P(alive at t) = exp(-(t / scale)^shape); REFT writes lambda t^c with lambda = scale^-c."""

    scale_seconds: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        positive("scale_seconds", self.scale_seconds)
        positive("shape", self.shape)

    @staticmethod
    def of_mean(mean_seconds: float, shape: float = 1.0) -> "Weibull":
        """The one with this mean time to failure."""
        return Weibull(
            positive("mean_seconds", mean_seconds) / math.gamma(1 + 1 / positive("shape", shape)), shape
        )

    def alive(self, seconds: float) -> float:
        return math.exp(-self._hazard(seconds))

    def failed(self, seconds: float) -> float:
        """1 - alive, without losing the small ones to rounding."""
        return -math.expm1(-self._hazard(seconds))

    def _hazard(self, seconds: float) -> float:
        try:
            return float((number("seconds", seconds) / self.scale_seconds) ** self.shape)
        except OverflowError:
            return math.inf

    def seconds_at(self, alive: float) -> float:
        """The time by which all but `alive` have failed; the inverse of `alive`."""
        number("alive", alive, high=1.0)
        return math.inf if alive == 0 else self.scale_seconds * (-math.log(alive)) ** (1 / self.shape)


def group_survival(node: Weibull, members: int, survives_losses: int, seconds: float) -> float:
    """A sharding group still has its state while at most `survives_losses` of its nodes are lost."""
    whole("members", members, low=1)
    whole("survives_losses", survives_losses, high=members)
    alive, failed = node.alive(seconds), node.failed(seconds)
    if survives_losses == members:
        return 1.0
    return math.fsum(
        math.comb(members, lost) * failed**lost * alive ** (members - lost)
        for lost in range(survives_losses + 1)
    )


def job_survival(node: Weibull, nodes: int, members: int, survives_losses: int, seconds: float) -> float:
    """All nodes / members sharding groups still have their state; nodes lost are not replaced."""
    if whole("nodes", nodes, low=1) % whole("members", members, low=1):
        raise InvalidInput(
            f"nodes is {nodes}: it must be a multiple of the {members} members of a sharding group"
        )
    group = group_survival(node, members, survives_losses, seconds)
    return group ** (nodes // members)


def sampled_job_survival(
    node: Weibull, nodes: int, members: int, survives_losses: int, seconds: float, *, samples: int, seed: int
) -> tuple[float, float]:
    """The same by drawing every node's time to failure: the share that survived, and its standard error."""
    random = np.random.default_rng(seed)
    groups = nodes // members
    survived = 0
    for _ in range(samples):
        times = node.scale_seconds * random.weibull(node.shape, (groups, members))
        survived += int(((times <= seconds).sum(axis=1) <= survives_losses).all())
    share = survived / samples
    return share, math.sqrt(max(share * (1 - share), 1 / samples) / samples)


def seconds_until(node: Weibull, nodes: int, members: int, survives_losses: int, survival: float) -> float:
    """How long until the chance of survival falls to `survival`, by bisection."""
    if number("survival", survival, high=1.0) == 1.0:
        return 0.0
    low, high = 0.0, node.scale_seconds
    while job_survival(node, nodes, members, survives_losses, high) > survival:
        low, high = high, 2 * high
        if high > 1e300:
            return math.inf
    for _ in range(200):
        middle = (low + high) / 2
        if job_survival(node, nodes, members, survives_losses, middle) > survival:
            low = middle
        else:
            high = middle
    return high
