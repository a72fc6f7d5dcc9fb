"""Two stages of a pipeline, each replicated by DDP."""

import time

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from unreplicated import BATCH, SECONDS, Built, run

STAGES, MICROBATCHES = 2, 2


def build(model: nn.Sequential) -> Built:
    replicas = dist.get_world_size() // STAGES
    mesh = init_device_mesh("cuda", (replicas, STAGES), mesh_dim_names=("data", "stage"))
    index = mesh["stage"].get_local_rank()
    first, last = model[0], model[-1]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    sizes = (first.in_features, first.out_features, last.out_features)
    own = model[:1] if index == 0 else model[1:]
    layers = DistributedDataParallel(own, process_group=mesh["data"].get_group())
    takes, gives = (torch.empty(BATCH // MICROBATCHES, sizes[at], device="cuda") for at in (index, index + 1))
    group, device = mesh["stage"].get_group(), torch.device("cuda")
    stage = PipelineStage(layers, index, STAGES, device, input_args=takes, output_args=gives, group=group)
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def passes(batch: Tensor) -> None:
        time.sleep(SECONDS)
        schedule.step(batch) if index == 0 else schedule.step(target=batch)

    return Built(layers, torch.optim.AdamW(layers.parameters(), lr=0.01), passes)


if __name__ == "__main__":
    run(build, alike=STAGES)
