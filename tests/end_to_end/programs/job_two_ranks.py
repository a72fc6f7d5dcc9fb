# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import jitckpt

STEPS, FATAL, VICTIM = 12, int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)]
model = DistributedDataParallel(nn.Sequential(*layers).to("cuda"), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)


class Batches:
    given = 0

    def next(self):
        self.given += 1
        return torch.randn(4, 8).to("cuda", non_blocking=True) + self.given * random.random()

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


batches = Batches()
torch.manual_seed(1 + rank)
random.seed(1 + rank)
job = jitckpt.init(
    checkpoint_dir="ckpt", model=model, optimizer=optimizer, scheduler=scheduler, extra=batches
)
start = job.restore()
passed = Path("passed")
for step in range(start + 1, STEPS + 1):
    for last in (False, True):
        with model.no_sync() if not last else torch.enable_grad():
            model(batches.next()).square().mean().backward()
    fatal = step == FATAL and os.environ["JITCKPT_RESTART"] == "0"
    if fatal and rank == VICTIM:
        torch.cuda.synchronize()
        while not passed.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    scheduler.step()
    if fatal:
        torch.cuda.synchronize()
        passed.touch()
    optimizer.zero_grad()
state = hashlib.sha256()
for tensor in [*model.state_dict().values(), torch.rand(3), torch.rand(3, device="cuda")]:
    state.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
end = f"{state.hexdigest()} {batches.given} {random.random()} {scheduler.get_last_lr()}"
print(f"rank {rank} {end}\n", end="", flush=True)
torch.distributed.destroy_process_group()
