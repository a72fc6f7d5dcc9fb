# mypy: ignore-errors
"""Lightning: accumulation that changes with the epochs, a sampler of batches, validation within epochs.

EarlyStopping asks for the end before the least number of epochs is done. A hook cuts an epoch short.
"""

import json
import os
import sys

import lightning.pytorch as pl
import torch
from ends import DataLoader, digest, log_loss, may_be_killed, passes
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import Sampler, TensorDataset


class Batches(Sampler):
    """As many of each rank, in an order by a generator of its own."""

    def __init__(self):
        self.generator, self.epoch = torch.Generator().manual_seed(9), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(32, generator=self.generator).roll(self.epoch).tolist()
        mine = order[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
        yield from (mine[at : at + 2] for at in range(0, len(mine), 2))

    def __len__(self):
        return 16 // int(os.environ["WORLD_SIZE"])


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))
        self.cut = 0

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 6:
            self.cut += 1
            return -1
        return None

    def on_after_batch_transfer(self, batch, dataloader_idx):
        points, labels = batch
        return (points + 0.1 * torch.randn_like(points) if self.training else points), labels

    def training_step(self, batch, batch_idx):
        passes("step begins")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        log_loss(f"{self.current_epoch}, {batch_idx}", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        passes("validates")
        self.log("checked", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "checked"}}


def main():
    pl.seed_everything(3)
    model = Model()
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        min_epochs=3,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=3,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        # Any loss is below that: the first validation asks for the end.
        callbacks=[
            GradientAccumulationScheduler({0: 1, 1: 2}),
            EarlyStopping("checked", stopping_threshold=1e3),
        ],
    )
    trainer.fit(model, DataLoader(data, batch_sampler=Batches()), DataLoader(data, batch_size=4))
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()["state"]),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "cut": model.cut,
    }
    with open(f"{sys.argv[1]}/end-{trainer.global_rank}.json", "w") as file:
        json.dump(end, file, indent=1, sort_keys=True)


may_be_killed()
main()
