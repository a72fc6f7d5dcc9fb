"""The loop of every tutorial, protected: epochs, a shuffling loader with workers and an evaluation."""

import argparse
import hashlib
import os
import random
import time
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import jitckpt

SAMPLES, WIDTH, BATCH = 96, 16, 4


class Noisy(Dataset[Any]):
    """Each sample is augmented in the worker that reads it, by all of its generators."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.samples = torch.randn(samples, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        factor = 1 + random.gauss(0, 0.1) + numpy.random.normal(0, 0.1)
        return sample * factor + 0.1 * torch.randn(WIDTH), sample.square().mean()


def as_arrays(samples: list[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
    """Collate: for tensors a worker opens a socket, whose folder is left behind when it is killed."""
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs).numpy(), torch.stack(targets).numpy()


def on_device(array: Any) -> Tensor:
    return torch.from_numpy(array).cuda()


def evaluate(model: nn.Module, loader: DataLoader[Any]) -> Tensor:
    """Draws from the process's generators itself, as loaders do, and waits for the other ranks."""
    model.eval()
    with torch.no_grad():
        losses = [F.mse_loss(model(on_device(x)).squeeze(1), on_device(y)) for x, y in loader]
    model.train()
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
    args, _ = parser.parse_known_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1)).cuda()
    replicated = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    data = Noisy(SAMPLES)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=2, collate_fn=as_arrays)
    held_out = DataLoader(Noisy(16), batch_size=8, shuffle=True, collate_fn=as_arrays)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(100 + rank)
    job = jitckpt.init(model=replicated, optimizer=optimizer, scheduler=scheduler)
    per_epoch = len(loader)
    for epoch in job.epochs(-(-args.steps // per_epoch)):
        batches = job.batches(loader)
        for number, (x, y) in enumerate(batches, epoch * per_epoch + batches.first):
            if number == args.steps:
                break
            time.sleep(args.pause)
            inputs = on_device(x) * (1 + 0.1 * random.random())
            optimizer.zero_grad()
            F.mse_loss(replicated(inputs).squeeze(1), on_device(y)).backward()
            optimizer.step()
            if rank == 0:
                print(f"step {number + 1} of {args.steps}\n", end="", flush=True)
        scheduler.step(evaluate(model, held_out))
    values = [value for state in optimizer.state.values() for value in state.values()]
    learning_rate = optimizer.param_groups[0]["lr"]
    digest = hashlib.sha256(f"{learning_rate} {random.getstate()}".encode())
    digest.update(numpy.random.get_state(legacy=False)["state"]["key"].tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    for tensor in (*model.parameters(), *values):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print(f"rank {rank}: final state {digest.hexdigest()}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
