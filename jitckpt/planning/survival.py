"""How long checkpoints in memory survive node losses (REFT, section 5): Weibull times to failure."""

import math
from dataclasses import dataclass

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
