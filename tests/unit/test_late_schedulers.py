"""A scheduler that takes over in a later epoch is named, with those of the job alone."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from jitckpt.worker.lookouts.late_schedulers import LateSchedulers


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1)


def test_a_scheduler_that_is_made_in_a_later_epoch_is_named_once() -> None:
    ours, other = optimizer(), optimizer()
    host: Any = SimpleNamespace(optimizers=[SimpleNamespace(optimizer=ours)])
    told: list[str] = []
    late = LateSchedulers(host, told.append)
    late._took = 0.0
    schedulers: list[Any] = [LinearLR(ours)]
    for epoch in range(4):
        if epoch == 1:
            schedulers.append(CosineAnnealingLR(other, 5))
        if epoch == 2:
            schedulers[0] = CosineAnnealingLR(ours, 5)
        for _ in range(3):
            late.batch_drawn(epoch)
        late._took = 0.0  # as if it took no time, so that each epoch is looked at
    (said,) = told
    assert said.startswith("The script has made a CosineAnnealingLR in epoch 2: no save holds it")


def test_it_is_looked_for_no_oftener_than_it_may_cost() -> None:
    host: Any = SimpleNamespace(optimizers=[])
    late = LateSchedulers(host, lambda text: None)
    late.batch_drawn(0)
    late._took = 3600.0
    late.batch_drawn(1)
    assert late._epoch == 0
    late._took = 0.0
    late.batch_drawn(1)
    assert late._epoch == 1
