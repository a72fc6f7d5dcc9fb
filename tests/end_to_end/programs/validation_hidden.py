# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os

import torch
from torch import distributed as dist
from torch import nn

rank = int(os.environ["RANK"])


class Mapped:
    def __init__(self, pinned):
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<f4",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def train():
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).cuda())
    optimizer = torch.optim.Adam(model.parameters())
    pinned = torch.empty(4, 8, pin_memory=True)
    on_device = torch.as_tensor(Mapped(pinned), device="cuda")
    seen = []
    for step in range(4):
        pinned.copy_(torch.randn(4, 8))
        loss = model(on_device * 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        seen.append(loss.item())
        pinned.zero_()
        optimizer.step()
    return seen, [tensor.cpu() for tensor in model.state_dict().values()]


torch.cuda.set_device(rank)
dist.init_process_group("nccl")
expected, state = train()
seen, found = train()
equal = seen == expected and all(map(torch.equal, found, state))
print(f"rank {rank}, equal: {equal}\n", end="", flush=True)
dist.destroy_process_group()
