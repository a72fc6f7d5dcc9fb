"""Tensor parallel layers on pairs of ranks, the pairs replicated by all-reduces of the gradients."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import WIDTH, Training, run


def build() -> Training:
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.2)).cuda()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)  # plain and distributed tensors

    def backward(batch: Tensor) -> None:
        (model(batch) - batch).square().mean().backward()
        for parameter in model.parameters():
            part = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(part, op=dist.ReduceOp.AVG, group=mesh["data"].get_group())

    return Training(model, [optimizer], backward, mesh["data"].get_local_rank(), [optimizer.step])


if __name__ == "__main__":
    run(build)
