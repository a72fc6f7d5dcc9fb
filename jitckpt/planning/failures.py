"""Sequences of failures for the simulator: without memory, with ageing, or as they were recorded."""

import csv
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jitckpt.decisions.check import InvalidInput, number, positive
from jitckpt.planning.cluster import Description, FailureMode
from jitckpt.planning.survival import Weibull
from jitckpt.planning.units import DAY_SECONDS
from jitckpt.system import regular_file

_BATCH = 4096


@dataclass(frozen=True)
class Failure:
    at_seconds: float
    mode: FailureMode
    component: int  # which gpu, machine, rack, ...


def exponential_failures(description: Description, seed: int) -> Iterator[Failure]:
    """Without memory, for ever: all components' failures together are one Poisson process."""
    modes = [mode for mode in description.failures if mode.per_day > 0]
    rates = np.array([mode.per_day * description.components(mode.scope) / DAY_SECONDS for mode in modes])
    if not modes:
        return
    random = np.random.default_rng(seed)
    components = np.array([description.components(mode.scope) for mode in modes])
    now = 0.0
    while True:
        waits = random.exponential(1 / rates.sum(), _BATCH)
        which = random.choice(len(modes), _BATCH, p=rates / rates.sum())
        where = random.integers(0, components[which])
        for wait, mode, component in zip(waits.tolist(), which.tolist(), where.tolist(), strict=True):
            now += wait
            yield Failure(now, modes[mode], component)


def weibull_failures(
    description: Description, shape: float, until_seconds: float, seed: int
) -> Iterator[Failure]:
    """Every component ages on its own, is new at the start and after each of its failures.

    The mean time between a component's failures is as the description says; a shape below 1 means many early
    failures, above 1 wear.
    """
    positive("shape", shape)
    random = np.random.default_rng(seed)
    due: list[tuple[float, int, int]] = []
    lives: dict[int, Weibull] = {}
    for index, mode in enumerate(description.failures):
        if mode.per_day == 0:
            continue
        life = lives[index] = Weibull.of_mean(DAY_SECONDS / mode.per_day, shape)
        times = life.scale_seconds * random.weibull(shape, description.components(mode.scope))
        due += [(float(times[c]), index, int(c)) for c in np.flatnonzero(times < until_seconds)]
    heapq.heapify(due)
    while due:
        at, index, component = due[0]
        yield Failure(at, description.failures[index], component)
        again = at + lives[index].scale_seconds * float(random.weibull(shape))
        if again < until_seconds:
            heapq.heapreplace(due, (again, index, component))
        else:
            heapq.heappop(due)


def with_triggered(description: Description, failures: Iterator[Failure], seed: int) -> Iterator[Failure]:
    """Adds the failures that a failure triggers (`cluster.Trigger`), and so on; all in order of time."""
    random = np.random.default_rng([seed, 1])  # not the numbers that the first failures are drawn with
    by_name = {mode.name: mode for mode in description.failures}
    due: list[tuple[float, int, Failure]] = []
    count = itertools.count()  # two of one time: in the order they were triggered

    def trigger(failure: Failure) -> None:
        for each in failure.mode.triggers:
            if random.random() >= each.chance:
                continue
            mode = by_name[each.failure]
            component = _component_near(description, failure, mode, each.within, random)
            if component is not None:
                follows = Failure(failure.at_seconds + each.delay_seconds, mode, component)
                heapq.heappush(due, (follows.at_seconds, next(count), follows))

    for failure in failures:
        while due and due[0][0] <= failure.at_seconds:
            follower = heapq.heappop(due)[2]
            yield follower
            trigger(follower)
        yield failure
        trigger(failure)
    while due:
        follower = heapq.heappop(due)[2]
        yield follower
        trigger(follower)


def _component_near(
    description: Description, failure: Failure, mode: FailureMode, within: str, random: np.random.Generator
) -> int | None:
    """Any component of the mode's scope in the same `within` as the failed one, but not that one itself."""
    ranks = description.ranks_of(failure.mode.scope, failure.component)
    around = description.ranks_of(within, ranks[0] // description.cluster.gpus_of(within))
    size = description.cluster.gpus_of(mode.scope)
    first = min(ranks[0], around[0]) // size
    last = max(ranks[-1], around[-1]) // size
    if mode.scope != failure.mode.scope:
        return int(random.integers(first, last + 1))
    if first == last:
        return None
    other = int(random.integers(first, last))
    return other if other < failure.component else other + 1


def recorded_failures(description: Description, path: Path) -> Iterator[Failure]:
    """From a CSV file with the columns seconds, failure (a name of the description), component."""
    modes = {mode.name: mode for mode in description.failures}
    before = 0.0
    with open(regular_file.open_regular(path), newline="") as file:
        reader = csv.DictReader(file)
        if set(reader.fieldnames or ()) != {"seconds", "failure", "component"}:
            raise InvalidInput(
                f"{path} has the columns {reader.fieldnames}: it must have seconds, failure, component"
            )
        for row in reader:
            where = f"line {reader.line_num} of {path}"
            if row["failure"] not in modes:
                raise InvalidInput(
                    f"failure in {where} is {row['failure']!r}: it must be one of {', '.join(modes)}"
                )
            mode = modes[row["failure"]]
            try:
                at, component = float(row["seconds"]), int(row["component"])
            except (TypeError, ValueError) as error:
                raise InvalidInput(
                    f"{where} must have a number of seconds and a whole component: {error}"
                ) from None
            number(f"seconds in {where} (in order of time)", at, low=before, high=math.inf)
            number(f"component in {where}", component, high=description.components(mode.scope) - 1)
            before = at
            yield Failure(at, mode, component)
