# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import hashlib
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 14


class Data(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(1000 * self.rank + i))
        return x, int(x[:4].argmax())


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    over, waited, added = False, [], 0

    def client():
        return dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=600),
        )

    def count():
        nonlocal added
        mine = client()
        while not over:
            added += 1
            counted = mine.add(f"count-{rank}", 1)
            if counted != added:
                return waited.append((counted, added))
            time.sleep(0.001)

    threads = [
        threading.Thread(target=lambda: waited.append(client().get("later"))),
        threading.Thread(target=count),
    ]
    for thread in threads:
        thread.start()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    total = 0.0
    for x, y in DataLoader(Data(rank), batch_size=8, num_workers=1, pin_memory=True):
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1).cuda(), group=group)
    if rank == 0:
        client().set("later", "now")
    over = True
    for thread in threads:
        thread.join()
    sha = hashlib.sha256()
    for tensor in (
        *model.state_dict().values(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ):
        sha.update(tensor.cpu().numpy().tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    print(f"rank {rank}: {sha.hexdigest()} {total!r} {waited} {os.getpid() == PID}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


PID = os.getpid()
main()
