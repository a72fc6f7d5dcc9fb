"""A transformer with dropout under DDP."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import BATCH, WIDTH, Training, run


def build() -> Training:
    block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH)).cuda()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def backward(batch: Tensor) -> None:
        texts = batch.view(2, BATCH // 2, WIDTH)
        (wrapped(texts) - texts.roll(1, 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return Training(model, [optimizer], backward, dist.get_rank(), [optimizer.step])


if __name__ == "__main__":
    run(build)
