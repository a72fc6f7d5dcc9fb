import time

import torch
from torch import distributed as dist
from torch import nn

import jitckpt

dist.init_process_group("nccl")
rank = dist.get_rank()
model = nn.Linear(64, 512).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer, shard=rank, shards=dist.get_world_size())
for step in range(job.restore(), 24):
    time.sleep(0.1)
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
