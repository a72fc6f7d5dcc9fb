"""A training with what a save does not hold, as argv[1] says; test_self_check.py runs it."""

import copy
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import jitckpt

STEPS = 14
MOVED = ("moved", "moved in a range")  # now and then, behind the step


class Counting(torch.optim.AdamW):
    counter = 0

    def step(self, closure: Any = None) -> Any:
        self.counter += 1
        return super().step(closure)


class Model(nn.Module):
    def __init__(self, plants: str) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("passes", torch.zeros(1), persistent=False)
        self.plants = plants
        if plants in ("momentum", *MOVED):  # the large one takes the longest to be copied
            self.wide, self.slow = (nn.Parameter(torch.ones(n), requires_grad=False) for n in (1 << 21, 8))

    def forward(self, batch: Tensor) -> Tensor:
        if self.plants == "buffer":
            self.get_buffer("passes").add_(1)
        if self.plants == "momentum":
            self.slow.data = 0.9 * self.slow.data + 0.1 * self.norm.weight.data[:8]
        result: Tensor = self.last(self.norm(self.first(batch)))
        return result


def rate(plants: str) -> Callable[[int], float]:
    calls = [0]

    def of_step(step: int) -> float:
        calls[0] += plants in ("closure", "count")
        return 0.95 ** (step + calls[0] * (plants == "closure"))

    return of_step


def replace_last(module: Model, optimizer: torch.optim.Optimizer) -> None:
    """Put another parameter in the last weight's place, with its state, as pruning does."""
    old = module.last.weight
    new = module.last.weight = nn.Parameter(old.detach().clone())
    (group,) = optimizer.param_groups
    group["params"] = [new if one is old else one for one in group["params"]]
    optimizer.state[new] = optimizer.state.pop(old)


def main() -> None:
    plants = sys.argv[1]
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    module = Model(plants).cuda()
    # DistributedDataParallel knows the parameters that there were at first.
    model = module if plants == "replaced" else DistributedDataParallel(module)
    teacher = copy.deepcopy(module)
    if plants == "replicas" and dist.get_rank() == 1:
        with torch.no_grad():
            module.get_parameter("last.weight").add_(1)
    optimizer = (Counting if plants == "attribute" else torch.optim.AdamW)(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(plants))
    job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler)
    torch.manual_seed(dist.get_rank())
    steps = job.steps(STEPS) if plants == "moved" else range(job.restore(), STEPS)
    for step in steps:
        if plants == "replaced" and step == 4:
            replace_last(module, optimizer)
        model(torch.randn(4, 8).cuda()).square().mean().backward()
        if plants == "replaced":
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if plants in MOVED and step % 4 == 1:
            time.sleep(0.5 * dist.get_rank())
            module.slow.add_(1)
        scheduler.step()
        optimizer.zero_grad()
        if plants == "teacher":
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
