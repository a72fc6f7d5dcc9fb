# mypy: ignore-errors
"""A training with transformers' Trainer: a tiny GPT-2, dropout, shuffling, evaluation, random data.

A Trainer and a callback of its own keep in attributes what they carry on, as users' do.
"""

import json
import os
import sys

import torch
import transformers
from ends import FSDP, PRECISION, digest, may_be_killed, state_of
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

STEPS_IN_EPOCH, EPOCHS = 4, 3


class Texts(Dataset):
    def __len__(self):
        return 4 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        text = torch.randint(60, (12,))  # another one each time: random numbers of the data
        text[0] = index
        return {"input_ids": text, "labels": text}


class Averaging(Trainer):
    average, calls = 0.0, 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        part = loss[0] if isinstance(loss, tuple) else loss
        if model.training:
            self.average, self.calls = 0.9 * self.average + part.item(), self.calls + 1
        return loss


class History(TrainerCallback):
    def __init__(self):
        self.steps, self.losses, self.begun = 0, [], {}

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun[state.global_step] = True

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses.append((logs or {}).get("loss"))


def main():
    transformers.set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "1")),
        dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
        fsdp="full_shard auto_wrap" if FSDP else None,
        fsdp_config={"version": FSDP, "transformer_layer_cls_to_wrap": ["GPT2Block"]} if FSDP else None,
        **({PRECISION: True} if PRECISION else {}),
    )
    history = History()
    trainer = Averaging(
        model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[history]
    )
    trainer.train()
    logs = [
        {key: value for key, value in one.items() if "runtime" not in key and "per_second" not in key}
        for one in trainer.state.log_history
    ]
    rank = int(os.environ["RANK"])
    end = {
        "parameters": digest(list(trainer.model_wrapped.parameters()) if FSDP else model.state_dict()),
        "optimizer": digest(state_of(trainer.optimizer)),
        "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "logs": logs,
        "own": [trainer.average, trainer.calls, history.steps, history.losses, len(history.begun)],
    }
    with open(f"{sys.argv[1]}/end-{rank}.json", "w") as file:
        json.dump(end, file, indent=1)
    torch.distributed.destroy_process_group()


may_be_killed()
main()
