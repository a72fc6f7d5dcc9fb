# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

proxy = ctypes.CDLL(None)
rank = int(os.environ["RANK"])
events = Path(sys.argv[1]) / "events.jsonl"
LEAST, MOST = 5, 100


def happened(event):
    return events.read_text().count('"' + event + '"')


def kill_server():
    with contextlib.suppress(ProcessLookupError):
        os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)


def be_late():
    torch.cuda.synchronize()
    recoveries, begin = happened("recovery_begun"), time.monotonic()
    while time.monotonic() - begin < (LEAST if happened("straggler") else MOST):
        time.sleep(0.1)
    print(f"recoveries meanwhile: {happened('recovery_begun') - recoveries}\n", end="", flush=True)


def train(happenings=None):
    torch.manual_seed(rank)
    stage = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(stage.parameters())
    seen = []
    for step in range(1, 9):
        there = torch.randn(4, 8).cuda()
        if rank == 0:
            output = stage(there)
            dist.send(output.detach(), 1)
            dist.recv(there, 1)
            output.backward(there)
        else:
            dist.recv(there, 0)
            there.requires_grad_()
            loss = stage(there).square().mean()
            loss.backward()
            dist.send(there.grad, 0)  # type: ignore[arg-type]
            seen.append(loss.item())
        if happenings:
            happenings.get((rank, step), lambda: None)()
        if (rank, step) != (1, 2):
            optimizer.step()
        optimizer.zero_grad()
    return seen, [tensor.cpu() for tensor in stage.state_dict().values()]


torch.cuda.set_device(rank)
dist.init_process_group("nccl")
seen, state = train()
again, same = train({(0, 3): kill_server, (1, 5): kill_server, (1, 7): be_late})
dist.barrier()
torch.cuda.synchronize()
begin = time.monotonic()
while not happened("hang_over") and time.monotonic() - begin < MOST:  # the agent asks now and then
    time.sleep(0.05)
print(f"rank {rank}, equal: {seen == again and all(map(torch.equal, state, same))}\n", end="", flush=True)
dist.destroy_process_group()
