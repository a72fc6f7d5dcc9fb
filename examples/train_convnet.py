"""A ConvNet with BatchNorm, whose running statistics differ by rank, that tells directions of stripes apart.

jitckpt run --nproc-per-node 2 examples/train_convnet.py
"""

import argparse
import os

import torch
import torch.nn.functional as F
from results import DoneSteps, report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt

CLASSES, SIZE = 8, 16


def draw_images(batch: int) -> tuple[Tensor, Tensor]:
    """Noisy stripes, (batch, 1, SIZE, SIZE), and the classes of their directions, drawn on the device."""
    classes = torch.randint(CLASSES, (batch,), device="cuda")
    angle = (classes * (torch.pi / CLASSES)).view(-1, 1, 1)
    phase = torch.rand(batch, 1, 1, device="cuda") * 2 * torch.pi
    row = torch.arange(SIZE, device="cuda").view(1, -1, 1)
    column = torch.arange(SIZE, device="cuda").view(1, 1, -1)
    stripes = torch.sin(row * torch.sin(angle) + column * torch.cos(angle) + phase)
    noisy = stripes + 0.5 * torch.randn(batch, SIZE, SIZE, device="cuda")
    return noisy.unsqueeze(1), classes


def convolution(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def build_model(channels: int) -> nn.Module:
    return nn.Sequential(
        convolution(1, channels),
        nn.MaxPool2d(2),
        convolution(channels, 2 * channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, CLASSES),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all (default 60)")
    parser.add_argument(
        "--batch", type=int, default=32, help="images of one rank in a minibatch (default 32)"
    )
    parser.add_argument("--channels", type=int, default=16, help="of the first convolution (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--checkpoint-dir", default="ckpt", help="where saves go (default ckpt)")
    parser.add_argument("--parameters", help="write the final parameters to this safetensors file")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(build_model(args.channels).to("cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(args.seed + 1 + rank)  # each rank draws other images

    done = DoneSteps(rank, args.steps)
    job = jitckpt.init(
        checkpoint_dir=args.checkpoint_dir, model=model, optimizer=optimizer, scheduler=scheduler
    )
    for step in job.steps(args.steps):
        images, classes = draw_images(args.batch)
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done.queued(step + 1)

    done.finish()
    report(rank, model.module, args.parameters)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
