# mypy: ignore-errors
"""A training with Accelerate whose loop carries on variables, some of which the training depends on."""

import json
import sys

import numpy
import torch
from accelerate import Accelerator
from ends import digest, log_loss, passes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

seen = 0


class Meter:
    def __init__(self):
        self.total, self.values = 0.0, []

    def add(self, value):
        self.total += value
        self.values.append(value)


def count(batch):
    global seen  # noqa: PLW0603
    seen += len(batch)


def main():
    torch.manual_seed(5)
    accelerator = Accelerator()
    data = TensorDataset(torch.randn(48, 16), torch.randint(0, 4, (48,)))
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=6, shuffle=True)
    )
    noise = numpy.random.default_rng(4)  # a generator of the script's own
    history, evaluated, best, scale, meter, step = [], [], None, 1.0, Meter(), 0
    for epoch in range(3):
        total = 0.0
        for number, (points, labels) in enumerate(tqdm(loader, disable=True)):
            passes("step begins")
            count(points)
            shift = noise.random()
            loss = nn.functional.cross_entropy(model(points + shift) * scale, labels)
            log_loss(step, loss)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            total += (value := loss.item())
            meter.add(loss.item())
            scale *= 0.98 if number % 3 else 0.99
        passes("epoch ends")
        history.append([total, value, number])
        model.eval()
        with torch.no_grad():
            evaluated.append(model(data.tensors[0].to(accelerator.device)).sum().item())
        model.train()
        if best is None or total < best[0]:
            best = total, epoch
    end = {
        "parameters": digest(accelerator.unwrap_model(model).state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
        "variables": [history, evaluated, best, scale, step, seen, meter.total, meter.values],
    }
    with open(f"{sys.argv[1]}/end-{accelerator.process_index}.json", "w") as file:
        json.dump(end, file, indent=1)
    accelerator.end_training()


main()
