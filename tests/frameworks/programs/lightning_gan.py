# mypy: ignore-errors
"""A GAN with Lightning's manual optimization: two optimizers and schedulers, noise in the training step."""

import json
import os
import sys

import lightning.pytorch as pl
import torch
from ends import DataLoader, digest, may_be_killed, passes
from torch import nn
from torch.utils.data import Dataset

EPOCHS = 3


class Points(Dataset):
    def __len__(self):
        return 4 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        return torch.randn(8) + index


class GAN(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.2), nn.LeakyReLU(), nn.Linear(16, 1)
        )

    def training_step(self, real, batch_idx):
        passes("step begins")
        for_generator, for_discriminator = self.optimizers()
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
        distance = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(for_generator)
        made = self.generator(torch.randn(len(real), 4, device=self.device))
        generator_loss = distance(self.discriminator(made), ones)
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        passes("between optimizers")

        self.toggle_optimizer(for_discriminator)
        made = self.generator(torch.randn(len(real), 4, device=self.device)).detach()
        loss = (distance(self.discriminator(real), ones) + distance(self.discriminator(made), zeros)) / 2
        for_discriminator.zero_grad()
        self.manual_backward(loss)
        passes("before the second")
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        passes("after both")
        self.log_dict({"generator": generator_loss, "discriminator": loss}, on_step=True, on_epoch=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        parts = self.generator, self.discriminator
        optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3, betas=(0.5, 0.9)) for one in parts]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in optimizers]


class Log(pl.Callback):
    """Keeps what was logged at each step, as a state of its own."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        passes("batch ends")
        self.seen[str(trainer.global_step)] = {
            name: value.item() for name, value in trainer.callback_metrics.items()
        }

    def on_train_epoch_end(self, trainer, module):
        self.seen[f"epoch {trainer.current_epoch}"] = {
            name: value.item() for name, value in trainer.callback_metrics.items()
        }

    def state_dict(self):
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state):
        self.seen = dict(state["seen"])


def main():
    pl.seed_everything(3)
    model, log = GAN(), Log()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp_find_unused_parameters_true",
        max_epochs=EPOCHS,
        callbacks=[log],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Points(), batch_size=2, shuffle=True))
    end = {
        "parameters": digest(model.state_dict()),
        "optimizers": [digest(one.state_dict()["state"]) for one in trainer.optimizers],
        "rates": [one.param_groups[0]["lr"] for one in trainer.optimizers],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "logs": log.seen,
    }
    with open(f"{sys.argv[1]}/end-{trainer.global_rank}.json", "w") as file:
        json.dump(end, file, indent=1, sort_keys=True)


may_be_killed()
main()
