"""DDP, fed by DataLoader processes through pinned memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from training import BATCH, WIDTH, Training, run

LOADERS = 2  # processes of each rank
MOST_STEPS = 1000


class Samples(Dataset[Tensor]):
    """Each rank has its own; they are made in the loader's processes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return MOST_STEPS * BATCH

    def __getitem__(self, index: int) -> Tensor:
        random = torch.Generator().manual_seed(self._rank * len(self) + index)
        return torch.randn(WIDTH, generator=random) + 0.01 * torch.rand(WIDTH)  # and the process's own


def build() -> Training:
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    wrapped = DistributedDataParallel(model.cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = Samples(dist.get_rank())
    batches = iter(DataLoader(samples, BATCH, shuffle=True, num_workers=LOADERS, pin_memory=True))

    def backward(_: Tensor) -> None:
        batch = next(batches).cuda(non_blocking=True)
        F.mse_loss(wrapped(batch), batch).backward()

    return Training(model, [optimizer], backward, dist.get_rank(), [optimizer.step])


if __name__ == "__main__":
    run(build)
