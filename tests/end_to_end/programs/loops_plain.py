# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os

import numpy
import torch
from torch import distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import jitckpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.Adam(model.parameters())
late = AveragedModel(model.module)
parameters = [*model.parameters()]
averages = [parameter.detach().clone() for parameter in parameters]
generator = numpy.random.default_rng(dist.get_rank())


def train():
    loss = model(torch.ones(2, 4).cuda() * generator.random()).sum()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for average, parameter in zip(averages, parameters):
            average.lerp_(parameter, 0.1)


job = jitckpt.init(model=nn.ModuleList([model, late]), optimizer=optimizer)
for step in range(job.restore(), 8):
    train()
    if step >= 5:
        late.update_parameters(model.module)
dist.destroy_process_group()
