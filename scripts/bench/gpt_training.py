"""The training of examples/train_gpt.py, for benchmarks that make its steps in turns and time them."""

import importlib
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class GptTraining:
    """One rank's, with the example's own options; torch.distributed is initialised, the device chosen."""

    def __init__(self, steps: int) -> None:
        """steps: as many as it will make at most."""
        sys.path.insert(0, str(EXAMPLES))
        sys.argv = ["train_gpt.py"]
        self._example = importlib.import_module("train_gpt")
        self._args = self._example.parse_arguments()
        self._args.steps = steps
        self._rank = torch.distributed.get_rank()
        corpus, kinds = self._example.standard_library()
        self._text = corpus.to("cuda")
        torch.manual_seed(self._args.seed)
        self.model = DistributedDataParallel(self._example.GPT(kinds, self._args).to("cuda"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self._args.learning_rate)

    def backward(self, step: int) -> None:
        """Make the forward and the backward pass of this step."""
        batch = self._example.draw_batch(self._text, self._args, step, 0, self._rank)
        self.model(batch, step, 1).backward()
