"""States of the example GPT as it is trained on the CPU, for benchmarks of what compresses them."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def states_of_steps(steps: int) -> Iterator[list[list[Tensor]]]:
    """Yield after each step the parameters, each with AdamW's moments of it."""
    arguments = argparse.Namespace(
        steps=steps, batch=16, length=64, width=128, layers=4, heads=4, dropout=0.1, seed=0
    )
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("train_gpt")
    torch.manual_seed(0)
    text, kinds = example.standard_library()
    model = example.GPT(kinds, arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(example.draw_batch(text, arguments, step), step, 1).backward()
        optimizer.step()
        state = optimizer.state
        yield [[p.detach(), state[p]["exp_avg"], state[p]["exp_avg_sq"]] for p in model.parameters()]
