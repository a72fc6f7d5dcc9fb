# mypy: ignore-errors
"""A training with DeepSpeed's engine: dropout, a shuffled loader, a scheduler; ZERO says which stage."""

import json
import os
import sys

import deepspeed
import torch
from ends import PRECISION, DataLoader, digest, log_loss, may_be_killed, passes
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

EPOCHS = 3
STAGE = int(os.environ.get("ZERO", "0"))


class Points(Dataset):
    def __len__(self):
        return 4 * 2 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index):
        return torch.randn(16) + index, torch.tensor(index % 4)  # random numbers of the data


def scale_of(optimizer):
    """Return the scale of losses with fp16."""
    return getattr(getattr(optimizer, "loss_scale_config", optimizer), "cur_scale", None)


def main():
    torch.manual_seed(5)
    deepspeed.init_distributed("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    data = Points()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        # It grows in the middle of an epoch.
        "fp16": {"enabled": PRECISION == "fp16", "initial_scale_power": 12, "loss_scale_window": 5},
    }
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            passes("step begins")
            loss = nn.functional.cross_entropy(
                engine(points.cuda().to(engine.get_data_types()[0])), labels.cuda()
            )
            log_loss(engine.global_steps, loss)
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters([*engine.module.parameters()], enabled=STAGE == 3):
        parameters = digest(list(engine.module.parameters()))
    end = {
        "parameters": parameters,
        "master": digest(getattr(optimizer, "fp32_partitioned_groups_flat", [])),
        "optimizer": digest(list(getattr(optimizer, "optimizer", optimizer).state.values())),
        "scheduler": scheduler.state_dict()["last_epoch"],
        "scale": scale_of(optimizer),
        "random": digest(torch.get_rng_state(), torch.cuda.get_rng_state()),
        "steps": [engine.global_steps, engine.micro_steps, engine.global_samples],
    }
    with open(f"{sys.argv[1]}/end-{os.environ['RANK']}.json", "w") as file:
        json.dump(end, file, indent=1)
    torch.distributed.destroy_process_group()


may_be_killed()
main()
