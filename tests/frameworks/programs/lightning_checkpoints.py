# mypy: ignore-errors
"""Lightning: checkpoints of the best and the last, a link to the last, early stopping, a scheduler."""

import json
import os
import sys
from functools import partial

import lightning.pytorch as pl
import torch
from ends import DataLoader, digest, may_be_killed, passes
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    def __len__(self):
        return 7 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        return torch.randn(8) + index % 4, torch.tensor(index % 2)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.noise = torch.Generator().manual_seed(4)  # of the script's own
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        passes("step begins")
        noise = torch.randn(batch[0].shape, generator=self.noise).to(self.device)
        return nn.functional.cross_entropy(self.net(batch[0] + noise), batch[1])

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0]) + 0.01 * torch.randn(1, device=self.device)
        self.log("val", nn.functional.cross_entropy(out, batch[1]), sync_dist=True)
        passes("validates")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 3e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        scheduler = {"scheduler": plateau, "monitor": "val", "interval": "step", "frequency": 3}
        return {"optimizer": optimizer, "lr_scheduler": scheduler | {"strict": False}}


def main():
    pl.seed_everything(3)
    model, out = Model(), sys.argv[1]
    best = ModelCheckpoint(f"{out}/best", "best", monitor="val", save_top_k=2, save_last=True)
    linked = ModelCheckpoint(f"{out}/linked", monitor="val", save_last="link", every_n_train_steps=5)
    stops = EarlyStopping("val", patience=4)
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=3,
        logger=False,
        callbacks=[stops, best, linked],
        val_check_interval=3,
        num_sanity_val_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Points(), batch_size=2, shuffle=True), DataLoader(Points(), batch_size=4))
    relative = partial(os.path.relpath, start=out)
    end = {
        "parameters": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()["state"]),
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": trainer.global_step,
        "best": [relative(best.best_model_path), str(best.best_model_score), relative(best.last_model_path)],
        "linked": [relative(linked.best_model_path), relative(linked.last_model_path)],
        "files": {folder: _steps_in(f"{out}/{folder}") for folder in ("best", "linked")},
        "stops": [stops.wait_count, stops.stopped_epoch],
    }
    with open(f"{out}/end-{trainer.global_rank}.json", "w") as file:
        json.dump(end, file, indent=1, sort_keys=True)


def _steps_in(folder):
    """Return of which step each file is, and whether it is a link."""
    paths = {name: f"{folder}/{name}" for name in os.listdir(folder)}
    return {
        name: [torch.load(path, map_location="cpu", weights_only=False)["global_step"], os.path.islink(path)]
        for name, path in paths.items()
    }


may_be_killed()
main()
