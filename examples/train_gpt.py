"""A character GPT on the source text of Python's standard library: plain PyTorch DDP, five lines of jitckpt.

jitckpt run --nproc-per-node 2 examples/train_gpt.py
"""

import argparse
import json
import os
import random
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from results import DoneSteps, report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt


class Block(nn.Module):
    """One transformer block: (batch, length, width) in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        per_head = (batch, length, self.heads, width // self.heads)
        query, key, value = (
            part.view(per_head).transpose(1, 2) for part in self.query_key_value(x).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(x)
        return x


class GPT(nn.Module):
    """Predicts the next character and keeps its losses on the device, so that nobody has to wait for them."""

    losses: Tensor

    def __init__(self, characters: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, args.width)
        self.positions = nn.Embedding(args.length, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(
            *(Block(args.width, args.heads, args.dropout) for _ in range(args.layers))
        )
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, characters, bias=False)
        # A buffer is part of the state: jitckpt brings it back like the rest.
        self.register_buffer("losses", torch.zeros(args.steps))

    def forward(self, characters: Tensor, step: int, micro_batches: int) -> Tensor:
        """characters: (batch, length + 1). Returns the mean loss of predicting each from those before it."""
        inputs, targets = characters[:, :-1], characters[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(positions))
        logits = self.head(self.norm(self.blocks(x)))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.losses[step] += loss.detach() / micro_batches
        return loss


def standard_library() -> tuple[Tensor, int]:
    """The standard library's own modules as numbers from 0, one a character, and how many kinds there are."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    kinds = sorted(set(text))
    number_of_byte = bytes(kinds.index(byte) if byte in kinds else 0 for byte in range(256))
    return torch.frombuffer(bytearray(text.translate(number_of_byte)), dtype=torch.uint8), len(kinds)


def draw_batch(text: Tensor, args: argparse.Namespace, *place: int) -> Tensor:
    """Excerpts of the text, (batch, length + 1), chosen by the seed and the place in the training alone."""
    starts = random.Random(f"{args.seed} {place}")
    chosen = [starts.randrange(len(text) - args.length) for _ in range(args.batch)]
    return torch.stack([text[start : start + args.length + 1] for start in chosen]).long()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default, meaning in (
        ("--steps", 60, "optimizer steps in all"),
        ("--batch", 16, "excerpts in a micro-batch of one rank"),
        ("--length", 64, "characters in an excerpt"),
        ("--width", 128, "features of a character"),
        ("--layers", 4, "transformer blocks"),
        ("--heads", 4, "attention heads"),
        ("--accumulation", 1, "micro-batches in a minibatch"),
        ("--seed", 0, "for the weights, the data and the dropout"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--dropout", type=float, default=0.1, help="(default 0.1)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default 2e-3)")
    parser.add_argument("--checkpoint-dir", default="ckpt", help="where saves go (default ckpt)")
    parser.add_argument("--losses", help="write the losses of rank 0 to this file, one JSON line a step")
    parser.add_argument("--parameters", help="write the final parameters to this safetensors file")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    corpus, kinds = standard_library()
    text = corpus.to("cuda")

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT(kinds, args).to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    torch.manual_seed(args.seed + rank)  # each rank drops out other features

    done = DoneSteps(rank, args.steps)
    job = jitckpt.init(
        checkpoint_dir=args.checkpoint_dir, model=model, optimizer=optimizer, scheduler=scheduler
    )
    for step in job.steps(args.steps):
        for micro_batch in range(args.accumulation):
            last = micro_batch == args.accumulation - 1
            with nullcontext() if last else model.no_sync():
                loss = model(draw_batch(text, args, step, micro_batch, rank), step, args.accumulation)
                (loss / args.accumulation).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done.queued(step + 1)

    done.finish()
    report(rank, model.module, args.parameters)
    if rank == 0 and args.losses:
        lines = (json.dumps({"step": i + 1, "loss": x}) for i, x in enumerate(model.module.losses.tolist()))
        Path(args.losses).write_text("\n".join(lines) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
