"""Fully sharded by FSDP's older wrapper: over all of two ranks; of more, in two replicas."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import WIDTH, Training, run


def build() -> Training:
    layers = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, WIDTH)).cuda()
    ranks = dist.get_world_size()
    model = FullyShardedDataParallel(
        layers,
        device_mesh=init_device_mesh("cuda", (2, ranks // 2)) if ranks > 2 else None,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if ranks > 2 else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def backward(batch: Tensor) -> None:
        (model(batch) - batch).square().mean().backward()
        model.clip_grad_norm_(0.5)

    return Training(model, [optimizer], backward, dist.get_rank(), [optimizer.step])


if __name__ == "__main__":
    run(build)
