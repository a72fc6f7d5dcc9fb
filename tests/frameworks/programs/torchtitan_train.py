# mypy: ignore-errors
"""torchtitan's own trainer (0.2), with a small model, a tokenizer and texts of its own."""

import json
import os
import sys
from pathlib import Path

from ends import may_be_killed
from titan_data import texts, tokenizer, train
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

RANK = os.environ["RANK"]
STEPS = 12


class Losses(Trainer):
    """Logs what it is given, as a trainer of the user's own may."""

    def forward_backward_step(self, *args, **kwargs):
        loss = super().forward_backward_step(*args, **kwargs)
        with open(f"{sys.argv[1]}/loss-{RANK}.jsonl", "a") as file:
            print(json.dumps([f"{self.step} {self.ntokens_seen}", loss.item()]), file=file)
        return loss


def main():
    out = Path(sys.argv[1])
    DATASETS["own"] = DatasetConfig(
        path="texts", loader=texts, sample_processor=lambda sample: sample["text"]
    )
    llama3_args["tiny"] = TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=64)
    options = {
        "model.name": "llama3",
        "model.flavor": "tiny",
        "model.hf_assets_path": tokenizer(out / f"tokenizer-{RANK}"),
        "job.dump_folder": out / "dump",
        "training.dataset": "own",
        "training.local_batch_size": 2,
        "training.seq_len": 16,
        "training.steps": STEPS,
        "metrics.log_freq": 1,
        "lr_scheduler.warmup_steps": 3,
        "debug.seed": 5,
        # Two replicas, each of them sharded where there are ranks for it.
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": int(os.environ["WORLD_SIZE"]) // 2,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    init_logger()
    train(Losses(ConfigManager().parse_args(words + os.environ.get("OPTIONS", "").split())), out)


may_be_killed()
main()
