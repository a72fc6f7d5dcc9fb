#!/usr/bin/env python3
"""What it costs in each step to see what a training changes of its state outside of its optimizer steps.

    watching.py [--parameters 100 10000] [--steps 200]

Of a model of so many parameters with Adam's state: the median processor time of the looks of one step, on
the host, with caches that are emptied before, as by a step. The looks are those of worker/around_steps.py:
whether parameters came or went, what was written since, where they lie and which are frozen. And the same
where torch is another one than jitckpt was built with, so that each tensor is asked by itself; in turn.
"""

import argparse
import statistics
import time
from typing import Any, cast

import torch
from torch import nn

from jitckpt.state import tensors_seen
from jitckpt.state.model_state import ModelState
from jitckpt.state.optimizer_state import states_of
from jitckpt.worker.saving.mirror import Mirror
from jitckpt.worker.saving.outside_changes import OutsideChanges

CACHE_BYTES = 64 << 20  # more than a core's caches hold


def median_seconds(parameters: int, steps: int) -> dict[bool, float]:
    """Return the median time of the looks of one step of a training that changes nothing outside.

    By whether torch is the one that jitckpt was built with.
    """
    model = nn.ParameterDict({str(number): torch.ones(4) for number in range(parameters)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = ModelState(model)
    (of_optimizer,) = states_of(optimizer, "optimizer.0", names=state.names, find=state.find)
    moments: dict[str, Any] = {
        f"{number}.{key}": value
        for number, kept in enumerate(of_optimizer.optimizer.state.values())
        for key, value in kept.items()
        if key != "step"
    }
    others = torch.ones(CACHE_BYTES, dtype=torch.uint8)
    watching = {}
    for is_known in (True, False):
        tensors_seen.is_known_torch = is_known
        watching[is_known] = OutsideChanges(cast(Mirror, None), print)
        watching[is_known].begins(0, [state.memory])
    taken: dict[bool, list[float]] = {True: [], False: []}
    for step in range(1, steps + 1):
        for is_known, outside in watching.items():
            tensors_seen.is_known_torch = is_known
            others.add_(1)
            begun = time.thread_time()
            outside.minibatch_begun(step)
            outside.step_begun(step)
            state.follow()
            state.held()
            outside.ended(step, [state.memory, moments], dict)
            taken[is_known].append(time.thread_time() - begun)
    return {is_known: statistics.median(seconds[2:]) for is_known, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 10000])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for parameters in arguments.parameters:
        seconds = median_seconds(parameters, arguments.steps)
        here, one_by_one = 1e6 * seconds[True], 1e6 * seconds[False]
        print(
            f"{parameters} parameters: {here:.0f} us a step, one tensor after the other {one_by_one:.0f} us"
        )


if __name__ == "__main__":
    main()
