"""Trains in one process, whose server is killed in some minibatches: KILLS, such as 3,5. Prints each loss."""

import ctypes
import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch.amp.grad_scaler import GradScaler

proxy = ctypes.CDLL(None)


def kill_server() -> None:
    os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)


def main() -> None:
    kills = {int(step) for step in sys.argv[1].split(",") if step}
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8 * 36, 10),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler(init_scale=1024.0)
    running = torch.zeros((), device="cuda")
    data = torch.Generator().manual_seed(1)
    for step in range(8):
        assert proxy.jitckpt_proxy_keep() == 0
        inputs = torch.randn(16, 3, 8, 8, generator=data).cuda()
        classes = inputs.abs().flatten(1).sum(1).long() % 10
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), classes)
        if step in kills and step % 2 == 0:
            kill_server()  # before the backward pass
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if step in kills and step % 2 == 1:
            kill_server()  # after the optimizer's step
        scaler.update()
        running += loss.detach()
        large = torch.nonzero(inputs > 2).shape[0]
        print(f"step {step}: loss {loss.item()!r}, {running.item()!r}, {scaler.get_scale()!r}, {large}")
    print("end", [parameter.double().sum().item() for parameter in [*model.parameters(), *model.buffers()]])


if __name__ == "__main__":
    main()
