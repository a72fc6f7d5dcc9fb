"""ZeRO, stage 1: the optimizer state of each rank is nowhere else."""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from unreplicated import Built, passes_of, run


def build(model: nn.Sequential) -> Built:
    replicated = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(replicated.parameters(), torch.optim.AdamW, lr=0.01)
    return Built(replicated, optimizer, passes_of(replicated))


if __name__ == "__main__":
    run(build)
