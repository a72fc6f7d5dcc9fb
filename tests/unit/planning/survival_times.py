"""For tests: job_survival the other way around, and by drawing."""

import math

import numpy as np

from jitckpt.planning.survival import Weibull, job_survival


def seconds_until(node: Weibull, nodes: int, members: int, survives_losses: int, survival: float) -> float:
    """How long until the chance of survival falls to `survival`, between 0 and 1, by bisection."""
    low, high = 0.0, node.scale_seconds
    while job_survival(node, nodes, members, survives_losses, high) > survival:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if job_survival(node, nodes, members, survives_losses, middle) > survival:
            low = middle
        else:
            high = middle
    return high


def sampled_job_survival(
    node: Weibull, nodes: int, members: int, survives_losses: int, seconds: float, *, samples: int, seed: int
) -> tuple[float, float]:
    """Survival by drawing every node's time to failure: the share that survived, and its standard error."""
    random = np.random.default_rng(seed)
    groups = nodes // members
    survived = 0
    for _ in range(samples):
        times = node.scale_seconds * random.weibull(node.shape, (groups, members))
        survived += int(((times <= seconds).sum(axis=1) <= survives_losses).all())
    share = survived / samples
    return share, math.sqrt(max(share * (1 - share), 1 / samples) / samples)
