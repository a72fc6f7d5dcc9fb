# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

import jitckpt
from jitckpt.events import read_events


def have_saved(step):
    events = read_events(Path("ckpt"))[0]
    return [event["step"] for event in events if event["event"] == "periodic_save"].count(step) == 2


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)).cuda()
model = nn.parallel.DistributedDataParallel(layers, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer, save_every=int(sys.argv[1]))
for step in range(job.restore(), 7):
    table = torch.full((1 << 19,), float(step)).cuda()
    loss = model(torch.randn(4, 8).cuda() + table[:8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()  # so that no rank is ahead when the failure comes
    while step == 4 and os.environ["JITCKPT_RESTART"] == "0" and not have_saved(4):
        time.sleep(0.01)
state = [*layers.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]
digest = hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in state)).hexdigest()
print(f"rank {dist.get_rank()}: {digest} {torch.rand(1).item()}\n", end="", flush=True)
dist.destroy_process_group()
