"""Two DDP ranks against one process that adds their gradients in the same order; run by torchrun."""

import os

import torch
import torch.distributed as dist
from models import GPT, MODELS, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 4
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))


def make(device: str) -> GPT:
    torch.manual_seed(0)
    return GPT().to(device)


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [[batch("gpt", generator) for _ in range(RANKS)] for _ in range(STEPS)]


def train_ranks() -> list[Tensor]:
    model = DistributedDataParallel(make("cuda"), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for step in batches():
        inputs, targets = step[rank]
        optimizer.zero_grad()
        model(inputs.cuda(), targets.cuda()).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_alone() -> list[Tensor]:
    model = make("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for step in batches():
        gradients = []
        for inputs, targets in step:
            gradients.append(torch.autograd.grad(model(inputs, targets), list(model.parameters())))
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = parts[0] / RANKS + parts[1] / RANKS
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def check_sync_batch_norm() -> None:
    images = torch.randn(RANKS * 4, 3, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alone, together = nn.BatchNorm2d(3).double(), nn.SyncBatchNorm(3).double().cuda()
    whole, mine = images.clone().requires_grad_(), images.chunk(RANKS)[rank].cuda().requires_grad_()
    alone(whole).pow(3).sum().backward()
    together(mine).pow(3).sum().backward()
    assert whole.grad is not None
    assert mine.grad is not None
    assert together.running_var is not None
    # Another formula than BatchNorm's, so equal up to rounding only.
    torch.testing.assert_close(mine.grad.cpu(), whole.grad.chunk(RANKS)[rank])
    torch.testing.assert_close(together.running_var.cpu(), alone.running_var)


def train_normed() -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(MODELS["resnet"]()).cuda()
    model = DistributedDataParallel(net, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        images, classes = (tensor.cuda() for tensor in batch("resnet", generator))
        optimizer.zero_grad()
        model(images, classes).backward()
        optimizer.step()
    return [tensor.float() for tensor in model.state_dict().values()]


def check_repeatable(tensors: list[Tensor], again: list[Tensor]) -> None:
    """The same twice, and the same on all ranks, with the statistics that the ranks have found together."""
    for tensor, other in zip(tensors, again, strict=True):
        assert torch.equal(tensor, other)
        of_first = tensor.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(tensor, of_first)


trained = train_ranks()
if rank == 0:
    assert all(torch.equal(a, b) for a, b in zip(trained, train_alone(), strict=True))
check_sync_batch_norm()
check_repeatable(train_normed(), train_normed())
dist.destroy_process_group()
