# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics

import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
rank = distributed.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(rank)


def net(width):
    layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4)).cuda()
    return nn.parallel.DistributedDataParallel(layers, device_ids=[rank])


generator, critic = net(8), net(16)
first, second = torch.optim.Adam(critic.parameters()), torch.optim.AdamW(generator.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda", init_scale=float(2**127))  # type: ignore[attr-defined]
for step in range(3):
    for optimizer, model in ((first, critic), (second, generator)):
        optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(model(torch.randn(3, 4, device="cuda")).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
distributed.destroy_process_group()
