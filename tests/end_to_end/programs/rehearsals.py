import os

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import jitckpt

torch.cuda.set_device(int(os.environ["RANK"]))
torch.distributed.init_process_group("nccl")
net = nn.Linear(4, 4).cuda()
average, model = AveragedModel(net), nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters())
job = jitckpt.init(checkpoint_dir="ckpt", model=nn.ModuleList([model, average]), optimizer=optimizer)
for step in range(job.restore(), 12):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
