import ctypes
import os
import signal
import sys

import torch
from torch import distributed as dist
from torch import nn

os.chdir(os.environ["TMPDIR"])
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
proxy = ctypes.CDLL(None)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8).cuda()).square().mean().backward()
    optimizer.step()
    if step == 3 and rank == 1:
        os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)
torch.cuda.synchronize()
server = proxy.jitckpt_proxy_server()
parent = open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[1]
facts = ["agent's" if int(parent) == os.getppid() else "not the agent's"]
try:
    facts.append(os.waitpid(-1, os.WNOHANG))  # type: ignore[arg-type]
except ChildProcessError:
    facts.append("no children")
facts.append(os.readlink(f"/proc/{server}/cwd") == os.getcwd())  # type: ignore[arg-type]
facts.append(os.sched_getaffinity(server) == os.sched_getaffinity(0))  # type: ignore[arg-type]
print(f"rank {rank}: {facts}\n", end="", flush=True)
dist.barrier()
if rank == 1 and sys.argv[1:]:
    os.kill(server, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
