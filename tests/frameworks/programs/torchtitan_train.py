# mypy: ignore-errors
"""torchtitan's own trainer, with a small model, a tokenizer and texts of its own."""

import json
import os
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from ends import digest, may_be_killed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

RANK = os.environ["RANK"]
WORDS = [f"w{number}" for number in range(60)]
STEPS = 12


def texts(path):
    drawn = random.Random(path)
    return Dataset.from_list(
        [{"text": " ".join(drawn.choices(WORDS, k=drawn.randint(5, 40)))} for _ in range(40)]
    )


def tokenizer(folder):
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


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
    trainer = Losses(ConfigManager().parse_args(words + os.environ.get("OPTIONS", "").split()))
    trainer.train()
    end = {
        "parameters": digest(*(part.state_dict() for part in trainer.model_parts)),
        "optimizer": digest(*(one.state_dict()["state"] for one in trainer.optimizers)),
        "rates": [one.state_dict()["_last_lr"] for one in trainer.lr_schedulers],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.step,
        "tokens": trainer.ntokens_seen,
        "data": digest(trainer.dataloader.dataset.state_dict()),
    }
    trainer.close()
    (out / f"end-{RANK}.json").write_text(json.dumps(end, indent=1, sort_keys=True))


may_be_killed()
main()
