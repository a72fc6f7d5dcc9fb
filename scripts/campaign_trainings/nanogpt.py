"""nanoGPT's train.py as it is, from the checkout that NANOGPT names, with less of all than its readme has.

What it prints has a word before it, as some of that looks like a campaign's own lines.
"""

import argparse
import contextlib
import io
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import Training, digest

WORDS, TEXT = 64, 4096  # the vocabulary, and how long the data are
FILES = ("configurator.py", "model.py", "train.py")
OPTIONS = (
    *("--dataset=noise", "--eval_iters=2", "--eval_interval=1000", "--log_interval=1", "--compile=False"),
    *("--batch_size=2", "--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=8", "--dropout=0.1"),
    *("--gradient_accumulation_steps=8", "--dtype=float32", "--out_dir=out", "--warmup_iters=3"),
)


class _Said(io.TextIOBase):
    def __init__(self, to: TextIO) -> None:
        self._to, self._line = to, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            print(f"nanoGPT: {line}\n", end="", file=self._to, flush=True)
        return len(text)


def folder(rank: str) -> Path:
    """Return a folder of this rank's with the program and its data, which it wants where it is started."""
    place = Path(f"nanogpt-{rank}").absolute()
    data = place / "data" / "noise"
    data.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if not (place / name).exists():
            (place / name).symlink_to(Path(os.environ["NANOGPT"], name))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": WORDS}))
    for number, name in enumerate(("train", "val")):
        noise = numpy.random.default_rng(number).integers(WORDS, size=TEXT, dtype=numpy.uint16)
        noise.tofile(data / f"{name}.bin")
    return place


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args, _ = parser.parse_known_args()
    rank, out, made = os.environ["RANK"], sys.stdout, [0]
    optimizers: list[torch.optim.Optimizer] = []

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizers[:] = [optimizer]
        made[0] += 1
        if rank == "0":
            print(f"step {made[0]}: made\n", end="", file=out, flush=True)

    register_optimizer_step_post_hook(stepped)
    place = folder(rank)
    os.chdir(place)
    sys.argv = [str(place / "train.py"), *OPTIONS, f"--max_iters={args.steps - 1}"]
    sys.path.insert(0, str(place))
    with contextlib.redirect_stdout(_Said(out)):
        ended = runpy.run_path(sys.argv[0], run_name="__main__")
    model: nn.Module = ended["raw_model"]
    print(
        f"rank {rank}: final state {digest(Training(model, optimizers, print, 0, []))}\n", end="", flush=True
    )


if __name__ == "__main__":
    main()
