import os
import shutil

import torch
from torch import distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 8).pin_memory().cuda(non_blocking=True)).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
left = shutil.disk_usage("/dev/shm").free
print(f"rank {rank}: {f'{left} bytes free' if left else 'full'}\n", end="", flush=True)
dist.destroy_process_group()
