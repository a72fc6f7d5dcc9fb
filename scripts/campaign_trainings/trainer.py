"""A tiny GPT-2 that transformers' Trainer trains: its loop, its scheduler, its loaders' processes."""

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from training import Training, digest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LENGTH, WORDS, BATCH, MOST_STEPS = 12, 64, 2, 1000
LOADERS = 1  # processes of each rank


class Texts(Dataset[dict[str, Tensor]]):
    """Made in the loader's processes, of their random numbers."""

    def __len__(self) -> int:
        return MOST_STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.randint(WORDS, (LENGTH,))
        text[0] = index % WORDS
        return {"input_ids": text, "labels": text}


class Told(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "0":
            print(f"step {state.global_step}: made\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args, _ = parser.parse_known_args()
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=LOADERS,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[Told()])
    trainer.train()
    inner: nn.Module = model
    optimizer = trainer.optimizer.optimizer  # in accelerate's
    ended = Training(inner, [optimizer], print, 0, [])
    print(f"rank {os.environ['RANK']}: final state {digest(ended)}\n", end="", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
