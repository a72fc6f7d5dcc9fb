"""ViT, a classifier of images with data parallelism: plain PyTorch DDP, AdamW, mixed precision.

jitckpt run --standalone --nproc-per-node 2 vit.py --protect
jitckpt run --standalone --nproc-per-node 2 --mode transparent vit.py

The paper's size: --size 224 --patch 14 --width 1280 --layers 32 --heads 16 --classes 1000.
"""

import argparse
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformer import Block
from workload import arguments, begin, end, tell


class ViT(nn.Module):
    """Images, (batch, 3, size, size), in; scores of the classes out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width = args.width
        self.patches = nn.Conv2d(3, width, args.patch, stride=args.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))  # where what is said of the whole gathers
        self.positions = nn.Parameter(0.02 * torch.randn(1, (args.size // args.patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(
            *(Block(width, args.heads, 0.1, causal=False) for _ in range(args.layers))
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, args.classes))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(images), -1, -1), patches], dim=1) + self.positions
        scores: Tensor = self.head(self.blocks(x)[:, 0])
        return scores


def main() -> None:
    args = arguments(
        __doc__,
        batch=(8, "images of one rank in a minibatch"),
        size=(32, "pixels of an image's side"),
        patch=(8, "pixels of a patch's side"),
        width=(64, "features of a patch"),
        layers=(3, "transformer blocks"),
        heads=(4, "attention heads"),
        classes=(10, "classes to tell apart"),
    )
    rank = begin(args.seed)
    network = ViT(args).cuda()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scaler = torch.amp.grad_scaler.GradScaler("cuda", init_scale=2.0**10)
    torch.manual_seed(args.seed + 1 + rank)  # each rank has images of its own, and drops other features

    steps: Iterable[int] = range(args.steps)
    if args.protect:
        import jitckpt

        steps = jitckpt.init(model=model, optimizer=optimizer, scaler=scaler).steps(args.steps)
    for step in steps:
        images = torch.randn(args.batch, 3, args.size, args.size).cuda()
        classes = torch.randint(args.classes, (args.batch,)).cuda()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        tell(step, loss)
    end(network, [optimizer])


if __name__ == "__main__":
    main()
