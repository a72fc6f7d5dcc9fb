# mypy: ignore-errors
"""transformers' Trainer: accumulation in epochs that are no multiple of it, evaluation, checkpoints."""

import json
import os
import random
import sys

import torch
import transformers
from ends import digest, may_be_killed, passes
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Texts(Dataset):
    def __len__(self):
        return 7 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        text = torch.randint(60, (12,))  # another one each time: random numbers of the data
        text[0] = index
        return {"input_ids": text, "labels": text}


class Places(TrainerCallback):
    """Counts what it hears of, in an attribute."""

    def __init__(self):
        self.heard, self.random, self.drawn = {}, random.Random(7), []

    def hear(self, place):
        self.heard[place] = self.heard.get(place, 0) + 1
        self.drawn.append(self.random.random())
        passes(place)

    def on_substep_end(self, *args, **kwargs):
        self.hear("substep ends")

    def on_optimizer_step(self, *args, **kwargs):
        self.hear("optimizer step")

    def on_log(self, *args, **kwargs):
        self.hear("log")

    def on_evaluate(self, *args, **kwargs):
        self.hear("evaluated")

    def on_save(self, *args, **kwargs):
        self.hear("saved")

    def on_epoch_end(self, *args, **kwargs):
        self.hear("epoch ends")

    def on_train_end(self, *args, **kwargs):
        self.hear("training ends")


def main():
    transformers.set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[1]}/own",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=int(os.environ.get("LOGS", "3")),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to=[],
        disable_tqdm=True,
    )
    places = Places()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[places]
    )
    trainer.train()
    logs = [
        {key: value for key, value in one.items() if "runtime" not in key and "per_second" not in key}
        for one in trainer.state.log_history
    ]
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()["state"]),
        "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "logs": logs,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "checkpoints": sorted(os.listdir(f"{sys.argv[1]}/own")),
        "heard": places.heard,
        "drawn": places.drawn,
    }
    with open(f"{sys.argv[1]}/end-{os.environ['RANK']}.json", "w") as file:
        json.dump(end, file, indent=1)
    torch.distributed.destroy_process_group()


may_be_killed()
main()
