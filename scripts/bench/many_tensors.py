"""What softgpu takes for an optimizer step of so many parameters: processor time of all its threads.

jitckpt exec --device softgpu -- python scripts/bench/many_tensors.py [--tensors 5000,10000,50000]
"""

import argparse
import time

import torch


def main() -> None:
    """Print a line for each number of tensors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", default="5000,10000,50000")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    for count in map(int, arguments.tensors.split(",")):
        seconds = min(step_times(count, arguments.steps))
        print(f"{count} tensors: {seconds:.2f} s a step, {seconds / count * 1e6:.0f} us a tensor", flush=True)


def step_times(count: int, steps: int) -> list[float]:
    """Return the processor time of each step but the first."""
    parameters = [torch.nn.Parameter(torch.ones(4, device="cuda")) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    times = []
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        begun = time.process_time()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.process_time() - begun)
    return times[1:]


if __name__ == "__main__":
    main()
