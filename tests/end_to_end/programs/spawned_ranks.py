# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import sys

import torch
import torch.multiprocessing as mp
from torch import nn

import jitckpt


def work(rank):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torch would wait for the launcher's store
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1]
    )
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = jitckpt.init(checkpoint_dir="ckpt", model=model, optimizer=optimizer)
    for step in range(job.restore(), 6):
        model(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.write(1, f"rank {rank} has trained {step + 1} steps\n".encode())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    descriptors = [os.environ[f"JITCKPT_{name}_FD"] for name in ("AGENT", "STATE", "LIFELINE")]
    mp.spawn(work, nprocs=2)  # type: ignore[attr-defined]
    print([os.readlink(f"/proc/self/fd/{number}").partition(":")[0] for number in descriptors])
