import os

import torch
import torch.utils.cpp_extension
from torch import nn

import jitckpt

assert torch.cuda.is_available()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda())
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer)
for step in range(job.restore(), 12):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    if os.environ["JITCKPT_RESTART"] == "0":
        torch.cuda.synchronize()
        while step == 5 and '"spares_started"' not in open("ckpt/events.jsonl").read():
            pass
torch.distributed.destroy_process_group()
