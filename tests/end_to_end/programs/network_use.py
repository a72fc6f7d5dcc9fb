# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import threading
import time
from pathlib import Path

import torch
from torch import distributed as dist

import jitckpt
from jitckpt.bindings.interpose import Native

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
jitckpt.init(model=model, optimizer=optimizer, checkpoint_dir="ckpt", self_check=False)
data = torch.ones(1000, device="cuda")
dist.all_reduce(data)
torch.cuda.synchronize()
words = torch.zeros(3, dtype=torch.int64)
WANTED, USED, ENDS = range(3)
telling = threading.Thread(
    target=Native().tell_network_use, args=[words.data_ptr() + 8 * word for word in (WANTED, USED, ENDS)]
)
telling.start()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


words[USED] = NOTHING = 7
words[WANTED] = 1
until(lambda: words[USED].item() != NOTHING)  # of what is called before nobody tells
if dist.get_rank() == 1:
    until(Path("seen").exists)
dist.all_reduce(data)
if dist.get_rank() == 0:
    until(lambda: words[USED].item())  # it waits for the other rank
    Path("seen").write_text("")
torch.cuda.synchronize()
until(lambda: not words[USED].item())
words[ENDS] = 1
telling.join()
print("told", flush=True)
dist.destroy_process_group()
