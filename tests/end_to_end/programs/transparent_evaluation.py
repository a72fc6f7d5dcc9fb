import ctypes
import os
import signal
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from jitckpt.events import read_events

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8).cuda()).square().mean().backward()
    optimizer.step()
rank = dist.get_rank()
dist.destroy_process_group()
if rank == 0:
    seen = model.module(torch.ones(4, 8).cuda()).tolist()
    while not any(event["event"] == "at_end" for event in read_events(Path("ckpt"))[0]):
        time.sleep(0.01)
    os.kill(ctypes.CDLL(None).jitckpt_proxy_server(), signal.SIGKILL)
    print("equal:", model.module(torch.ones(4, 8).cuda()).tolist() == seen)
