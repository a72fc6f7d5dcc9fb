# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
events = Path(sys.argv[1]) / "events.jsonl"


def train():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8).cuda()).square().mean().backward()
        torch.cuda.synchronize()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


torch.cuda.set_device(rank)
torch.zeros(1, device="cuda")
dist.init_process_group("nccl")
while rank == 1 and '"straggler"' not in events.read_text():
    time.sleep(0.05)
print(f"rank {rank}, equal: {train() == train()}\n", end="", flush=True)
dist.destroy_process_group()
