# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(torch.ones(6, 4), batch_size=1)  # type: ignore[arg-type,var-annotated]
job = jitckpt.init(model=model, optimizer=optimizer, accumulation=4)


def step():
    optimizer.step()
    optimizer.zero_grad()


for epoch in job.epochs(2):
    for index, batch in enumerate(job.batches(loader)):
        model(batch.cuda()).sum().backward()
        if (index + 1) % 4 == 0:
            step()
    if (index + 1) % 4:
        step()
dist.destroy_process_group()
