# mypy: ignore-errors
"""Lightning: a scheduler made for the number of steps, a metric that is logged, hooks that change weights.

Its training step writes a log of its own. LOADER=stream: over a stream, which Lightning reads a batch ahead.
"""

import json
import os
import sys

import lightning.pytorch as pl
import torch
import torchmetrics
from ends import DataLoader, digest, log_loss, may_be_killed, passes
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import IterableDataset

EPOCHS = 3


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(8):
            yield torch.randn(8) + number, torch.tensor(number % 2)  # random numbers of the data


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        return torch.randn(8) + index, torch.tensor(index % 2)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
        self.teacher = nn.Linear(8, 2).requires_grad_(False)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.begun = 0

    def on_train_epoch_start(self):
        self.temperature = 1.0 + 0.5 * self.current_epoch

    def on_train_batch_start(self, batch, batch_idx):
        self.begun += 1

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.net[0].weight[:2], alpha=0.1)

    def training_step(self, batch, batch_idx):
        passes("step begins")
        points, labels = batch
        out = self.net(points) / self.temperature
        loss = nn.functional.cross_entropy(out, labels) + 0.1 * (out - self.teacher(points)).pow(2).mean()
        self.accuracy(out, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        log_loss(self.begun, loss)
        return loss

    def on_train_epoch_end(self):
        log_loss(f"epoch {self.current_epoch}", self.trainer.callback_metrics["accuracy_epoch"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        if os.environ.get("LOADER") == "stream":
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    pl.seed_everything(3)
    model = Model()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=CSVLogger(sys.argv[1], name="logs"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if os.environ.get("LOADER") == "stream":
        loader = DataLoader(Stream(), batch_size=2)
    else:
        loader = DataLoader(Points(), batch_size=2, shuffle=True)
    trainer.fit(model, loader)
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()["state"]),
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.global_step,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "begun": model.begun,
    }
    if trainer.is_global_zero:
        with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
            end["logged"] = file.read()
    with open(f"{sys.argv[1]}/end-{trainer.global_rank}.json", "w") as file:
        json.dump(end, file, indent=1, sort_keys=True)


may_be_killed()
main()
