# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os

import torch
from torch import distributed as dist
from torch import nn


class Counting(torch.optim.SGD):
    def step(self):  # type: ignore[override]
        super().step()
        steps.add_(1).mul_(1.5)


rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(rank)
steps = torch.zeros(128, device="cuda")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 64).cuda())
optimizer = Counting(model.parameters(), 0.1)
for step in range(7):
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step + 1}: {loss.item().hex()}\n", end="", flush=True)
print(f"rank {rank}: {steps.sum().item().hex()}\n", end="", flush=True)  # type: ignore[union-attr]
dist.destroy_process_group()
