"""The `train.py` that the documents' commands name: two small layers, under jitckpt's protection."""

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch", type=int, default=16)
args = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).cuda())
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer)
for step in job.steps(args.steps):
    inputs = torch.randn(args.batch, 16).cuda()
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1} of {args.steps}: loss {loss.item():.9f}", flush=True)
torch.distributed.destroy_process_group()
