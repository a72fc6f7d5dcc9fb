# mypy: ignore-errors
"""Lightning: a datamodule whose hooks count, draw random numbers, and make their data of both.

Behind the training it is validated, tested, and used.

RELOAD=N: they are called anew every N epochs. ESTIMATE=1: before the first step, too, as a scheduler asks.
"""

import json
import os
import random
import sys

import lightning.pytorch as pl
import torch
from ends import DataLoader, digest, log_loss, may_be_killed, passes
from torch import nn
from torch.utils.data import TensorDataset, random_split


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.made, self.seeds, self.level = {"setup": 0, "train": 0, "val": 0, "test": 0}, [], None

    def setup(self, stage):
        self.made["setup"] += 1
        points = torch.randn(16, 8)
        self.train, self.val = random_split(TensorDataset(points, (points.sum(1) > 0).long()), [8, 8])

    def train_dataloader(self):
        self.made["train"] += 1
        self.seeds.append(int(torch.randint(1000, ())))
        points, labels = map(torch.stack, zip(*self.train, strict=True))
        points = points * random.uniform(0.5, 1.5) + 0.1 * self.made["train"] + (self.level or 0)
        generator = torch.Generator().manual_seed(self.seeds[-1])
        return DataLoader(TensorDataset(points, labels), batch_size=2, shuffle=True, generator=generator)

    def val_dataloader(self):
        self.made["val"] += 1
        points, labels = map(torch.stack, zip(*self.val, strict=True))
        return DataLoader(TensorDataset(points + torch.randn(()) + self.made["val"], labels), batch_size=2)

    def test_dataloader(self):
        self.made["test"] += 1
        return self.val_dataloader()


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
        self.checked = []

    def training_step(self, batch, batch_idx):
        passes("step begins")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        log_loss(self.global_step, loss)
        self.trainer.datamodule.level = 0.01 * batch_idx  # what the next call of a hook finds
        return loss

    def validation_step(self, batch, batch_idx):
        passes("validates")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.checked.append(loss.item())
        self.log("checked", loss, sync_dist=True)

    def test_step(self, batch, batch_idx):
        passes("tests")
        self.checked.append(self.net(batch[0]).sum().item())

    def predict_step(self, batch, batch_idx):
        passes("predicts")
        return self.net(batch[0] + torch.randn(())).sum().item()

    def configure_optimizers(self):
        if os.environ.get("ESTIMATE"):
            assert self.trainer.estimated_stepping_batches == 20
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    pl.seed_everything(3)
    model, data = Model(), Data()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=int(os.environ.get("RELOAD", "0")),
        use_distributed_sampler=False,
    )
    trainer.fit(model, datamodule=data)
    optimizer, steps = digest(trainer.optimizers[0].state_dict()["state"]), trainer.global_step
    trainer.validate(model, datamodule=data)
    trainer.test(model, datamodule=data)
    predicted = trainer.predict(model, data.val_dataloader())
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": optimizer,
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": steps,
        "made": data.made,
        "seeds": data.seeds,
        "checked": model.checked,
        "predicted": predicted,
    }
    with open(f"{sys.argv[1]}/end-{trainer.global_rank}.json", "w") as file:
        json.dump(end, file, indent=1, sort_keys=True)


may_be_killed()
main()
