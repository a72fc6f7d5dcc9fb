"""Trains with CUDA graphs in one process, whose server is killed in some minibatches: KILLS, such as 3,5.

Prints each loss. WAY: whole (the optimizer's step is in the graph), or gradients.
"""

import ctypes
import os
import signal
import sys

import torch
import torch.nn.functional as F

proxy = ctypes.CDLL(None)


def kill_server() -> None:
    os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)


def main() -> None:
    way = sys.argv[1]
    kills = {int(step) for step in sys.argv[2].split(",") if step}
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 10)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    inputs, classes = torch.randn(16, 16, device="cuda"), torch.randint(0, 10, (16,), device="cuda")
    pinned = torch.zeros(16, 16).pin_memory()

    def step() -> torch.Tensor:
        inputs.copy_(pinned, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), classes)
        loss.backward()
        if way == "whole":
            optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    data = torch.Generator().manual_seed(1)
    for number in range(8):
        assert proxy.jitckpt_proxy_keep() == 0
        torch.cuda.synchronize()
        pinned.copy_(torch.randn(16, 16, generator=data))
        graph.replay()
        if number in kills and number % 2 == 0:
            kill_server()
        if way != "whole":
            optimizer.step()
        if number in kills and number % 2 == 1:
            kill_server()
        print(f"step {number}: loss {loss.item()!r}")
    print("end", [parameter.double().sum().item() for parameter in [*model.parameters(), *model.buffers()]])


if __name__ == "__main__":
    main()
