# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import contextlib
import ctypes
import os
import random
import signal
import threading

import torch
from torch import distributed as dist
from torch import nn

from jitckpt.worker.in_place import keeper

proxy = ctypes.CDLL(None)
rank = int(os.environ["RANK"])
delays = []


def kill_server():
    with contextlib.suppress(ProcessLookupError):
        os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)


original = keeper._Validation.run


def run(self):
    timer = threading.Timer(delays.pop() if delays else 60, kill_server)
    timer.start()
    heard = original(self)
    timer.cancel()
    return heard


keeper._Validation.run = run  # type: ignore[method-assign]


def train(name):
    torch.manual_seed(rank)
    random.seed(rank)
    inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)).cuda()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=2)  # type: ignore[attr-defined]
    average = [parameter.detach().clone() for parameter in inner.parameters()]
    running = torch.zeros(300, device="cuda")
    seen = []
    for step in range(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            # The host's random numbers are in the calls: as an argument of a kernel, and as what is copied.
            loss = model(torch.randn(4, 8).cuda() * random.random()).square().mean()
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        running += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for mean, parameter in zip(average, inner.parameters()):
                mean.lerp_(parameter, 0.1)
        seen.append(loss.item())
    nameless = " ".join(f"{one.data_ptr():#x}" for one in (running, *average))
    print(f"{name}, rank {rank}: {nameless}\n", end="", flush=True)
    state = [*inner.state_dict().values(), *average, running, scaler._scale]
    state += [value for one in optimizer.state.values() for value in one.values()]
    return seen, [tensor.cpu() for tensor in state]


torch.cuda.set_device(rank)
dist.init_process_group("nccl")
expected, state = train("first")
for name in ("second", "third"):
    if name == "third" and rank == 1:
        delays += [0.03, 0.01, 0.0]
    seen, found = train(name)
    equal = seen == expected and len(found) == len(state) and all(map(torch.equal, found, state))
    print(f"{name}, rank {rank}, equal: {equal}\n", end="", flush=True)
dist.destroy_process_group()
