# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt


def wait_for_the_data():
    time.sleep(3600)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer, checkpoint_dir="ckpt")
for step in job.steps(4):
    if step == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        wait_for_the_data()
    model(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
