"""HSDP whose two replicas are neighbours: on one host, where that has several ranks, and lost with it."""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from unreplicated import Built, passes_of, run


def build(model: nn.Sequential) -> Built:
    ranks = torch.arange(dist.get_world_size()).view(-1, 2).T
    mesh = DeviceMesh("cuda", ranks, mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Built(model, torch.optim.AdamW(model.parameters(), lr=0.01), passes_of(model))


if __name__ == "__main__":
    run(build)
