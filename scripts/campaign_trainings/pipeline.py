"""Two stages of a pipeline, each replicated by DDP, with an optimizer for each half of its parameters."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from training import BATCH, WIDTH, Training, run

MICROBATCHES = 2


def build() -> Training:
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "stage"))
    index = mesh["stage"].get_local_rank()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)).cuda()
    wrapped = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    shape = torch.empty(BATCH // MICROBATCHES, WIDTH, device="cuda")
    group = mesh["stage"].get_group()
    stage = PipelineStage(
        wrapped, index, 2, torch.device("cuda"), input_args=shape, output_args=shape, group=group
    )

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
    parameters = list(model.parameters())
    first = torch.optim.AdamW(parameters[:2], lr=0.01)
    second = torch.optim.SGD(parameters[2:], lr=0.01, momentum=0.9)

    def backward(batch: Tensor) -> None:
        schedule.step(batch) if index == 0 else schedule.step(target=batch)

    steps = [first.step, second.step]
    return Training(model, [first, second], backward, mesh["data"].get_local_rank(), steps)


if __name__ == "__main__":
    run(build)
