import hashlib
import os

import torch
from torch import distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(rank)
inner = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 1)).cuda()
model = nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.Adam(model.parameters())
average = [parameter.detach().clone() for parameter in inner.parameters()]
running = torch.zeros(300, device="cuda")
for step in range(11):
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    loss.backward()
    running += loss.detach()
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(average, inner.parameters()):
            mean.lerp_(parameter, 0.1)
            parameter.grad.mul_(0.9)  # type: ignore[union-attr]
    if rank == 0:
        print(f"step {step + 1}: {loss.item().hex()}\n", end="", flush=True)
state = [*inner.state_dict().values(), *average, running]
state += [parameter.grad for parameter in inner.parameters()]
digest = hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in state)).hexdigest()
print(f"rank {rank}: {digest}\n", end="", flush=True)
dist.destroy_process_group()
