"""ZeRO, stage 1: the optimizer state of each rank is nowhere else."""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from unreplicated import Built, run


def build(model: nn.Sequential) -> Built:
    replicated = DistributedDataParallel(model)
    return replicated, ZeroRedundancyOptimizer(replicated.parameters(), torch.optim.AdamW, lr=0.01)


if __name__ == "__main__":
    run(build)
