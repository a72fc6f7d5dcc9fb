"""PyramidNet, a classifier of images with data parallelism: plain PyTorch DDP, SGD, BatchNorm.

jitckpt run --standalone --nproc-per-node 2 pyramidnet.py --protect
jitckpt run --standalone --nproc-per-node 2 --mode transparent pyramidnet.py

The running statistics of BatchNorm differ by rank between two steps.
The paper's size: --size 224 --layers 6 --first 64 --more 1344 --classes 1000 has 235 million parameters.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workload import arguments, begin, end, tell


class Block(nn.Module):
    """Two convolutions whose results have a few channels more; the shortcut is filled up with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.avg_pool2d(x, self.stride) if self.stride > 1 else x
        total: Tensor = self.layers(x) + F.pad(shortcut, (0, 0, 0, 0, 0, self.more))
        return total


def pyramid(layers: int, first: int, more: int, classes: int) -> nn.Sequential:
    """Return three stages of so many blocks, which add `more` channels to the first ones, all alike."""
    blocks: list[nn.Module] = []
    channels = [first + round(more * number / (3 * layers)) for number in range(3 * layers + 1)]
    for number, (inputs, outputs) in enumerate(pairwise(channels)):
        blocks.append(Block(inputs, outputs, stride=2 if number in (layers, 2 * layers) else 1))
    stem = [nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first)]
    head = [nn.BatchNorm2d(channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, *blocks, *head, nn.Linear(channels[-1], classes))


def main() -> None:
    args = arguments(
        __doc__,
        batch=(8, "images of one rank in a minibatch"),
        size=(16, "pixels of an image's side"),
        layers=(2, "blocks in each of the three stages"),
        first=(8, "channels of the first layer"),
        more=(24, "channels that the last one has more"),
        classes=(10, "classes to tell apart"),
    )
    rank = begin(args.seed)
    network = pyramid(args.layers, args.first, args.more, args.classes)
    model = DistributedDataParallel(network.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.steps // 2, 3 * args.steps // 4])
    torch.manual_seed(args.seed + 1 + rank)  # each rank has images of its own

    steps: Iterable[int] = range(args.steps)
    if args.protect:
        import jitckpt

        steps = jitckpt.init(model=model, optimizer=optimizer, scheduler=scheduler).steps(args.steps)
    for step in steps:
        images = torch.randn(args.batch, 3, args.size, args.size).cuda()
        classes = torch.randint(args.classes, (args.batch,)).cuda()
        loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        tell(step, loss)
    end(network, [optimizer])


if __name__ == "__main__":
    main()
