"""GPT2-S, pre-training with data parallelism: plain PyTorch DDP, AdamW, dropout.

jitckpt run --standalone --nproc-per-node 2 gpt2_s.py --protect
jitckpt run --standalone --nproc-per-node 2 --mode transparent gpt2_s.py

The paper's size: --width 768 --layers 12 --heads 12 --length 1024 --vocabulary 50257.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformer import Block
from workload import arguments, begin, end, tell


class GPT2(nn.Module):
    """(batch, length) of tokens in, scores of each one's successor out; the embedding is the head, too."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, heads, 0.1, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.drop(self.tokens(tokens) + self.positions(positions)))
        return F.linear(self.norm(x), self.tokens.weight)


def main() -> None:
    args = arguments(
        __doc__,
        batch=(8, "texts of one rank in a minibatch"),
        length=(32, "tokens of a text"),
        vocabulary=(512, "different tokens"),
        width=(64, "features of a token"),
        layers=(3, "transformer blocks"),
        heads=(4, "attention heads"),
    )
    rank = begin(args.seed)
    network = GPT2(args.vocabulary, args.length, args.width, args.layers, args.heads)
    model = DistributedDataParallel(network.cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(args.seed + 1 + rank)  # each rank has texts of its own, and drops other features

    steps: Iterable[int] = range(args.steps)
    if args.protect:
        import jitckpt

        steps = jitckpt.init(model=model, optimizer=optimizer, scheduler=scheduler).steps(args.steps)
    for step in steps:
        texts = torch.randint(args.vocabulary, (args.batch, args.length + 1)).cuda()
        scores = model(texts[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        tell(step, loss)
    end(network, [optimizer])


if __name__ == "__main__":
    main()
