"""A small data-parallel training with state of every kind, run by the tests of this folder.

What a rank alone knows is there, too: its batches, random numbers, the statistics of batch normalisation.
"""

import argparse
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt


class Batches:
    """Drawn at random; its state is how many it gave."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> Tensor:
        self.given += 1
        return torch.randn(4, 8).add_(self.given * random.random()).to("cuda", non_blocking=True)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def fill_the_disk() -> None:
    """From now on this process can write no file that is large enough for a save."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--full-disk", type=int, help="of this rank, after the first step")
    parser.add_argument("--unwritable", type=int, help="so is the directory in this step")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    rank, first_life = distributed.get_rank(), os.environ["JITCKPT_RESTART"] == "0"
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers).to("cuda"), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    batches = Batches()
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    numpy.random.seed(1 + rank)
    job = jitckpt.init(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra=batches,
        save_every=options.save_every,
    )
    for step in range(job.restore() + 1, options.steps + 1):
        if first_life and step == 2 and rank == options.full_disk:
            fill_the_disk()
        if step == options.unwritable and rank == 0:
            Path(job.root).chmod(0o555 if first_life else 0o755)
        for last in (False, True):
            with torch.enable_grad() if last else model.no_sync():
                model(batches.next()).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(options.pause)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
