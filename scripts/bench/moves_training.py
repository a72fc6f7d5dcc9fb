"""A plain DDP training for moves.py: each rank says what it ends with, and its median minibatch's seconds."""

import argparse
import hashlib
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, CLASSES, BATCH = 64, 10, 32


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Each rank has its own."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self._rank * self._size + index)
        sample = torch.randn(WIDTH, generator=random)
        return sample, sample[:CLASSES].argmax()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    sha, seconds = hashlib.sha256(), []
    begun = time.monotonic()
    for inputs, classes in DataLoader(
        Samples(rank, args.steps * BATCH), BATCH, num_workers=args.loaders, pin_memory=args.loaders > 0
    ):
        loss = F.cross_entropy(model(inputs.cuda(non_blocking=True)), classes.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sha.update(float(loss.item()).hex().encode())
        now = time.monotonic()
        seconds.append(now - begun)
        begun = now
    for tensor in (
        *model.state_dict().values(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ):
        sha.update(tensor.detach().cpu().numpy().tobytes())
    print(f"rank {rank}: {sha.hexdigest()} {statistics.median(seconds)}\n", end="", flush=True)
    torch.distributed.destroy_process_group()


main()
