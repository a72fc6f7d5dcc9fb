"""FSDP2, full shard: parameters and optimizer state of each rank are nowhere else."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from unreplicated import Built, passes_of, run


def build(model: nn.Sequential) -> Built:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return Built(model, torch.optim.AdamW(model.parameters(), lr=0.01), passes_of(model))


if __name__ == "__main__":
    run(build)
