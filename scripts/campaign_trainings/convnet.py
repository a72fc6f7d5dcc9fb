"""BatchNorm, dropout, mixed precision with a scaler that leaves out steps, and two parts of each batch."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from training import BATCH, WIDTH, Training, run


def build() -> Training:
    layers = [
        nn.Unflatten(1, (1, 4, WIDTH // 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
    ]
    model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH)).cuda()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler("cuda", init_scale=2.0**16, growth_interval=3)

    def backward(batch: Tensor) -> None:
        for part, is_last in ((batch[: BATCH // 2], False), (batch[BATCH // 2 :], True)):
            wrapped.require_backward_grad_sync = is_last
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (wrapped(part) - part).square().mean()
            scaler.scale(loss).backward()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Training(model, [optimizer], backward, dist.get_rank(), [step])


if __name__ == "__main__":
    run(build)
