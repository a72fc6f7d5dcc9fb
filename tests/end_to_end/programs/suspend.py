# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import hashlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 36


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
    rank, pid, over, added = dist.get_rank(), os.getpid(), False, 0
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=600),
    )

    def count():
        nonlocal added
        while not over:
            added += 1
            assert store.add(f"count-{rank}", 1) == added
            time.sleep(0.01)

    thread = threading.Thread(target=count)
    thread.start()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)).cuda()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    total, clocks = 0.0, time.time() - time.monotonic()
    loader = DataLoader(Data(rank), batch_size=8, num_workers=1, pin_memory=True)
    for step, (x, y) in enumerate(loader, 1):
        while int(Path("upto").read_text() or 0) < step:
            time.sleep(0.01)
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        Path(f"step-{rank}").write_text(str(step))
    over = True
    thread.join()
    sha = hashlib.sha256()
    for tensor in (
        *model.state_dict().values(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ):
        sha.update(tensor.cpu().numpy().tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    print(f"rank {rank}: {sha.hexdigest()} {total!r} {os.getpid() == pid}\n", end="", flush=True)
    print(f"stood still {time.time() - time.monotonic() - clocks}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
