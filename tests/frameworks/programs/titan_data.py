# mypy: ignore-errors
"""Texts and a tokenizer for torchtitan; trains, and says what that has ended with."""

import json
import os
import random

import torch
from datasets import Dataset
from ends import digest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = [f"w{number}" for number in range(60)]


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


def train(trainer, out):
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
    (out / f"end-{os.environ['RANK']}.json").write_text(json.dumps(end, indent=1, sort_keys=True))
