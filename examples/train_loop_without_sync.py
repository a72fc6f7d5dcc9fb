"""A loop that never waits for the device: dropout, accumulation, gradient clipping, data order in `extra`.

jitckpt run --nproc-per-node 2 examples/train_loop_without_sync.py
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from results import DoneSteps, report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt

SAMPLES, FEATURES, MICRO_BATCHES = 4096, 64, 2


class ShuffledOrder:
    """Goes through all samples in a new order each epoch; where it is belongs to the state of its rank."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.position = seed, 0, 0
        self.order = self.shuffled()

    def shuffled(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(SAMPLES, generator=generator).pin_memory().to("cuda", non_blocking=True)

    def next(self, count: int) -> Tensor:
        if self.position + count > SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self.shuffled()
        chosen = self.order[self.position : self.position + count]
        self.position += count
        return chosen

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = self.shuffled()


def build_model(width: int) -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(nn.Linear(FEATURES, width), *hidden, nn.Linear(width, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all (default 60)")
    parser.add_argument("--batch", type=int, default=256, help="samples in a micro-batch (default 256)")
    parser.add_argument("--width", type=int, default=512, help="features of a hidden layer (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--checkpoint-dir", default="ckpt", help="where saves go (default ckpt)")
    parser.add_argument("--parameters", help="write the final parameters to this safetensors file")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()

    torch.manual_seed(args.seed)
    samples = torch.randn(SAMPLES, FEATURES).to("cuda")
    targets = samples.square().mean(dim=1, keepdim=True)
    model = DistributedDataParallel(build_model(args.width).to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(args.seed + 1 + rank)  # each rank drops out other features
    order = ShuffledOrder(args.seed + 1 + rank)

    done = DoneSteps(rank, args.steps)
    job = jitckpt.init(
        checkpoint_dir=args.checkpoint_dir,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra=order,
    )
    for step in job.steps(args.steps):
        for micro_batch in range(MICRO_BATCHES):
            chosen = order.next(args.batch)
            last = micro_batch == MICRO_BATCHES - 1
            with nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(samples[chosen]), targets[chosen])
                (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done.queued(step + 1)

    done.finish()
    report(rank, model.module, args.parameters)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
