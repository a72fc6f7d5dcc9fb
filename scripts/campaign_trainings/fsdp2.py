"""Fully sharded: two shards, and as many replicas of each as there are pairs of ranks."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import WIDTH, Training, run


def build() -> Training:
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    layers = [nn.Linear(WIDTH, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, WIDTH)]
    model = nn.Sequential(*layers).cuda()
    for layer in layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def backward(batch: Tensor) -> None:
        (model(batch) - batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return Training(model, [optimizer], backward, dist.get_rank(), [optimizer.step])


if __name__ == "__main__":
    run(build)
