# mypy: ignore-errors
"""A training with Accelerate that stops early, in the middle of an epoch, as all ranks agree."""

import json
import sys

import torch
from accelerate import Accelerator
from ends import digest, passes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(5)
    accelerator = Accelerator()
    data = TensorDataset(torch.randn(48, 16), torch.randint(0, 4, (48,)))
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=6, shuffle=True)
    )
    best, bad, stop = None, 0, False
    for epoch in range(6):
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if best is None or loss.item() < best - 0.3:
                best, bad = loss.item(), 0
            else:
                bad += 1
            if bad >= 5:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                stop = True
                passes("triggered")
                break
        if stop:
            break
    passes("left")
    with torch.no_grad():
        of_all = accelerator.gather(model(data.tensors[0].to(accelerator.device)).sum()).sum().item()
    end = {
        "parameters": digest(accelerator.unwrap_model(model).state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
        "epoch": epoch,
        "of_all": of_all,
    }
    with open(f"{sys.argv[1]}/end-{accelerator.process_index}.json", "w") as file:
        json.dump(end, file, indent=1)
    accelerator.end_training()


main()
