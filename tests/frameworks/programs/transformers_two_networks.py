# mypy: ignore-errors
"""transformers' Trainer with a second network that learns, with an optimizer and a scheduler of its own."""

import json
import os
import sys

import torch
import transformers
from ends import digest, log_loss, may_be_killed, passes
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    def __len__(self):
        return 6 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        text = torch.randint(60, (12,))  # another one each time: random numbers of the data
        text[0] = index
        return {"input_ids": text, "labels": text}


class Adversarial(Trainer):
    def __init__(self, critic, **given):
        super().__init__(**given)
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
        self.critic, self.critic_optimizer = self.accelerator.prepare(critic, optimizer)
        self.critic_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        self.critics = 0

    def compute_loss(self, model, inputs, return_outputs=False, **given):
        out = model(**inputs, output_hidden_states=True)
        hidden = out.hidden_states[-1].mean(1)
        self.critic_optimizer.zero_grad()
        critic = self.critic(hidden.detach()).pow(2).mean() - self.critic(hidden.detach() + 1).mean()
        critic.backward()
        self.critic_optimizer.step()
        passes("between optimizers")
        self.critic_scheduler.step()
        self.critics += 1
        loss = out.loss + 0.1 * self.critic(hidden).mean()
        log_loss(self.critics, loss)
        return (loss, out) if return_outputs else loss


def main():
    transformers.set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    critic = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[1]}/own",
        num_train_epochs=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Adversarial(critic, model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    logs = [
        {key: value for key, value in one.items() if "runtime" not in key and "per_second" not in key}
        for one in trainer.state.log_history
    ]
    end = {
        "parameters": digest(model.state_dict(), trainer.critic.state_dict()),
        "optimizers": digest(
            *(one.state_dict()["state"] for one in (trainer.optimizer, trainer.critic_optimizer))
        ),
        "rate": trainer.critic_optimizer.param_groups[0]["lr"],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": [trainer.state.global_step, trainer.critics],
        "logs": logs,
    }
    with open(f"{sys.argv[1]}/end-{os.environ['RANK']}.json", "w") as file:
        json.dump(end, file, indent=1)
    torch.distributed.destroy_process_group()


may_be_killed()
main()
