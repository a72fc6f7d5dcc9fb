# mypy: ignore-errors
"""A training with Lightning: dropout, shuffling, validation, a scheduler, logs by step and by epoch.

Its module and callbacks keep in attributes what they carry on, as users' do.
"""

import json
import os
import sys

import lightning.pytorch as pl
import torch
from ends import FSDP, NORM, PRECISION, DataLoader, digest, may_be_killed, state_of
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import Dataset

EPOCHS = 3


class Points(Dataset):
    def __len__(self):
        return 4 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        return torch.randn(16) + index, torch.tensor(index % 4)  # random numbers of the data


class Average:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def add(self, value):
        self.sum, self.count = self.sum + value, self.count + 1


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        self.calls, self.ends, self.carried = 0, 0, None
        self.average = Average()
        self.net = nn.Sequential(nn.Linear(16, 32), NORM(32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 4))

    def configure_model(self):
        if FSDP == 2:
            policy = (
                MixedPrecisionPolicy(torch.bfloat16, torch.float32) if PRECISION else MixedPrecisionPolicy()
            )
            for part in (self.net, self.frozen):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

    def on_train_epoch_start(self):
        self.losses, self.temperature = [], 1.0 + 0.5 * self.current_epoch
        if self.current_epoch:
            self.frozen.eval()

    def training_step(self, batch, batch_idx):
        self.calls += 1
        out = self.net(batch[0] + 0.1 * self.frozen(batch[0]))
        if self.carried is not None:
            out = out + 0.01 * self.carried
        self.carried = out.detach().mean(0)
        loss = nn.functional.cross_entropy(out / self.temperature, batch[1])
        self.losses.append(loss.detach())
        self.average.add(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ends += 1

    def on_train_epoch_end(self):
        self.log("of_all", torch.stack(self.losses).sum())

    def validation_step(self, batch, batch_idx):
        self.log("checked", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Log(pl.Callback):
    """Keeps what was logged at each step, as a state of its own."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen[str(trainer.global_step)] = [
            outputs["loss"].item(),
            trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        ]

    def on_train_epoch_end(self, trainer, module):
        self.seen[f"epoch {trainer.current_epoch}"] = {
            name: value.item() for name, value in trainer.callback_metrics.items()
        }

    def state_dict(self):
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state):
        self.seen = dict(state["seen"])


class Count(pl.Callback):
    """Keeps in attributes how often it was called, with no state of its own."""

    def __init__(self):
        self.begun, self.ended = 0, {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.begun += 1

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ended[trainer.current_epoch] = self.ended.get(trainer.current_epoch, 0) + 1


def main():
    pl.seed_everything(3)
    model, log, count = Model(), Log(), Count()
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=["ddp", FSDPStrategy(), ModelParallelStrategy()][FSDP],
        precision=f"{PRECISION.removeprefix('fp')}-mixed" if PRECISION and FSDP < 2 else None,
        max_epochs=EPOCHS,
        callbacks=[log, count],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
        use_distributed_sampler=True,
    )
    workers = int(os.environ.get("WORKERS", "0"))
    trainer.fit(
        model,
        DataLoader(Points(), batch_size=2, shuffle=True, num_workers=workers),
        DataLoader(Points(), batch_size=2),
    )
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(state_of(trainer.optimizers[0])),
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "logs": log.seen,
        "attributes": [model.calls, model.ends, model.average.sum, model.average.count, len(model.losses)],
        "carried": digest(model.carried),
        "counted": [count.begun, count.ended],
    }
    with open(f"{sys.argv[1]}/end-{trainer.global_rank}.json", "w") as file:
        json.dump(end, file, indent=1, sort_keys=True)


may_be_killed()
main()
