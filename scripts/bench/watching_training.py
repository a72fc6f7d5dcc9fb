#!/usr/bin/env python3
"""What jitckpt's hooks take of a step of examples/train_gpt.py, and would without the part built with torch.

    jitckpt exec --device softgpu --devices 1 -- python scripts/bench/watching_training.py [--pairs 30]

One rank makes steps in which the tensors that are watched are read in C++, and others in which each is asked
by itself, as is done where torch is another one than jitckpt was built with; in turn, which comes first
changes with each pair. Prints the medians of the processor time of the training's thread inside of the hooks.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from step_cost import Training

from jitckpt.state import tensors_seen
from jitckpt.state.tensors_seen import OneByOne

WARM_UP = 20


class Watching:
    """A training whose watched tensors are read in one of both ways."""

    def __init__(self, training: Training) -> None:
        self._training, self._seconds = training, 0.0
        protection: Any = training.job._protection
        for handle in protection._hooks._handles:
            hooks = handle.hooks_dict_ref()
            hooks[handle.id] = self._timed(hooks[handle.id])
        training.make(WARM_UP)
        self._outside = protection._outside
        self.names, in_one_call = self._outside._looked
        tensors = [tensor for part in self._outside._watched for tensor in part.values()]
        self._ways = {True: in_one_call, False: OneByOne(tensors)}

    def step(self, in_one_call: bool) -> float:
        """Return the seconds of a step's hooks; the step before it is made in the same way."""
        tensors_seen.is_known_torch = in_one_call
        self._outside._looked = self.names, self._ways[in_one_call]
        self._outside._look_from_now()
        self._training.make(1)
        self._seconds = 0.0
        self._training.make(1)
        return self._seconds

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = time.thread_time()
            result = hook(*args)
            self._seconds += time.thread_time() - begun
            return result

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    taken: dict[bool, list[float]] = {True: [], False: []}
    with TemporaryDirectory() as folder:
        training = Training(WARM_UP + 4 * pairs, folder)
        watching = Watching(training)
        for pair in range(pairs):
            for in_one_call in (pair % 2 == 0, pair % 2 == 1):
                taken[in_one_call].append(1e6 * watching.step(in_one_call))
        training.job.close()
        torch.distributed.destroy_process_group()
    in_one_call, one_by_one = (statistics.median(taken[way]) for way in (True, False))
    print(f"{len(watching.names)} tensors are watched; inside of a step's hooks: {in_one_call:.0f} us")
    print(f"one tensor after the other: {one_by_one:.0f} us")


if __name__ == "__main__":
    main()
