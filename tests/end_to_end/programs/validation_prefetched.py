# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os

import torch
from torch import distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).cuda())
optimizer = torch.optim.AdamW(model.parameters())


def batch():
    return torch.randint(50, (8, 16)).cuda()


ahead = batch()
for step in range(5):
    for part in range(2):
        model.require_backward_grad_sync = part == 1
        loss = nn.functional.cross_entropy(model(ahead).flatten(0, 1), ahead.flatten())
        ahead = batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}: {loss.item().hex()}\n", end="", flush=True)  # type: ignore[union-attr]
dist.destroy_process_group()
