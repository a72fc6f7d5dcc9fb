import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer, checkpoint_dir="ckpt")
for step in job.steps(16):
    model(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    while step == 12 and os.environ["RANK"] == "1" and not Path("go_on").exists():
        time.sleep(0.1)  # for which rank 0 waits in its next collective
torch.distributed.destroy_process_group()
