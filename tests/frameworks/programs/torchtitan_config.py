# mypy: ignore-errors
"""torchtitan's own trainer as from 0.3 on, with a small model, a tokenizer and texts of its own."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ends import may_be_killed
from titan_data import texts, tokenizer, train
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

RANK = os.environ["RANK"]
STEPS = 12


class Losses(Trainer):
    """Logs what it is given, as a trainer of the user's own may."""

    def forward_backward_step(self, **kwargs):
        loss = super().forward_backward_step(**kwargs)
        with open(f"{sys.argv[1]}/loss-{RANK}.jsonl", "a") as file:
            print(json.dumps([f"{self.step} {self.ntokens_seen}", loss.item()]), file=file)
        return loss


def configured(out):
    config = llama3_debugmodel()
    spec = model_registry("debugmodel", attn_backend="varlen")  # which only a GPU has, as the others
    layers = [
        replace(one, attention=replace(one.attention, inner_attention=ScaledDotProductAttention.Config()))
        for one in spec.model.layers[:2]
    ]
    config.model_spec = replace(spec, model=replace(spec.model, layers=layers))
    config.loss = CrossEntropyLoss.Config()
    config.hf_assets_path = str(tokenizer(out / f"tokenizer-{RANK}"))
    config.dump_folder = str(out / "dump")
    config.dataloader.dataset = "own"
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, 16, STEPS
    # In a graph no phase of the passes begins, so that a fault could be played there.
    training.disable_cuda_graphs = os.environ.get("GRAPHS") != "1"
    config.debug.seed = 5
    config.validator.enable = False
    # Two replicas, each of them sharded where there are ranks for it.
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.data_parallel_shard_degree = int(os.environ["WORLD_SIZE"]) // 2
    return config


def main():
    out = Path(sys.argv[1])
    DATASETS["own"] = DatasetConfig(
        path="texts", loader=texts, sample_processor=lambda sample: sample["text"]
    )
    init_logger()
    train(Losses(configured(out)), out)


may_be_killed()
main()
