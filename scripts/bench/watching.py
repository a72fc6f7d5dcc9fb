#!/usr/bin/env python3
"""What it costs in each step to see what a training changes of its state outside of its optimizer steps.

    watching.py [--parameters 100 10000] [--steps 200]

Of a model of so many parameters with Adam's state: the median time of the looks of one step, on the host,
with caches that are emptied before, as by a step. The looks are those of worker/job.py: whether parameters
came or went, what was written since, where they lie and which are frozen.
"""

import argparse
import statistics
import time
from typing import Any, cast

import torch
from torch import nn

from jitckpt.state.host_state import ModelState
from jitckpt.state.optimizer_state import states_of
from jitckpt.worker.saving.mirror import Mirror
from jitckpt.worker.saving.outside_changes import OutsideChanges

CACHE_BYTES = 64 << 20  # more than a core's caches hold


def median_seconds(parameters: int, steps: int) -> float:
    """Return the median time of the looks of one step of a training that changes nothing outside."""
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
    outside = OutsideChanges(cast(Mirror, None), print)
    outside.begins(0, state.memory)
    others = torch.ones(CACHE_BYTES, dtype=torch.uint8)
    taken = []
    for step in range(1, steps + 1):
        others.add_(1)
        begun = time.perf_counter()
        outside.minibatch_begun(step)
        outside.step_begun(step)
        state.follow()
        state.held()
        outside.ended(step, [state.memory, moments], dict)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 10000])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for parameters in arguments.parameters:
        seconds = median_seconds(parameters, arguments.steps)
        print(f"{parameters} parameters: {1e6 * seconds:.0f} us a step")


if __name__ == "__main__":
    main()
