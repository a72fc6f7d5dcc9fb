"""Tensor parallel layers on pairs of ranks; each pair has replicas."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from unreplicated import Built, passes_of, run

RANKS = 2  # that have a replica together


def build(model: nn.Sequential) -> Built:
    replicas = dist.get_world_size() // RANKS
    mesh = init_device_mesh("cuda", (replicas, RANKS), mesh_dim_names=("data", "tensor"))
    layers = nn.Sequential(model[0], model[1], model[3])  # dropout would differ between the two
    parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    usual = passes_of(layers)

    def passes(batch: Tensor) -> None:
        """Average by hand: no wrapper says that there are replicas."""
        usual(batch)
        for parameter in layers.parameters():
            part = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(part, op=dist.ReduceOp.AVG, group=mesh["data"].get_group())

    # One by one: there are plain parameters and DTensors.
    return Built(layers, torch.optim.AdamW(layers.parameters(), lr=0.01, foreach=False), passes)


if __name__ == "__main__":
    run(build, alike=RANKS)
