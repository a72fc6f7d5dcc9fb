# mypy: ignore-errors
"""A training with Accelerate: dropout, samples or a stream, a scheduler, accumulation; FSDP, too."""

import json
import os
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from ends import FSDP, IS_STATEFUL, NORM, PRECISION, digest, log_loss, may_be_killed, state_of
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

EPOCHS = 3
KIND = os.environ.get("OPTIMIZER")  # of torchao's, if one


class Points(Dataset):
    def __len__(self):
        return 7 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        return torch.randn(16) + index, torch.tensor(index % 4)  # random numbers of the data


class Stream(IterableDataset):  # which one process reads for all
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        points = Points()
        yield from (points[index + self.epoch] for index in range(len(points)))


def main():
    torch.manual_seed(5)
    loaders = DataLoaderConfiguration(use_stateful_dataloader=IS_STATEFUL)
    accelerator = Accelerator(
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "2")),
        dataloader_config=loaders,
        mixed_precision=PRECISION or None,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=FSDP, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
        if FSDP
        else None,
    )
    width = 512 if KIND else 32  # torchao takes codes for what is large alone
    model = nn.Sequential(nn.Linear(16, width), NORM(width), nn.Dropout(0.2), nn.GELU(), nn.Linear(width, 4))
    if KIND:
        import torchao.optim

        optimizer = getattr(torchao.optim, KIND)(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if os.environ.get("LOADER") == "stream":
        loader = DataLoader(Stream(), batch_size=2)
    else:
        workers = int(os.environ.get("WORKERS", "0"))
        loader = DataLoader(Points(), batch_size=2, shuffle=True, num_workers=workers)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    if os.environ.get("LOADER") == "own":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loader = [(points.to(accelerator.device), labels.to(accelerator.device)) for points, labels in loader]
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(EPOCHS):
        model.train()
        skips = os.environ.get("LOADER") == "skips" and epoch == 1
        for points, labels in accelerator.skip_first_batches(loader, 2) if skips else loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                log_loss([scheduler.scheduler.last_epoch, accelerator.sync_gradients], loss)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 16, device=accelerator.device))
    end = {
        "parameters": digest(
            list(model.parameters()) if FSDP else accelerator.unwrap_model(model).state_dict()
        ),
        "buffers": digest(list(model.buffers())),
        "scale": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "optimizer": digest(state_of(optimizer)),
        "scheduler": scheduler.state_dict()["last_epoch"],
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
    }
    with open(f"{sys.argv[1]}/end-{accelerator.process_index}.json", "w") as file:
        json.dump(end, file, indent=1)
    accelerator.end_training()


may_be_killed()
main()
