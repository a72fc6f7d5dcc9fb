"""A training in which one rank keeps the other waiting, for each of the reasons that are no failure.

Each pause lasts until the launcher has found that the others wait. In its first life rank 1 waits for ever
in the end. For each pause a line goes to the file `pauses`: reason, rank, and when it began and ended.
"""

import ctypes
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import jitckpt
from jitckpt.worker.saving.periodic import PeriodicSaver

STEPS, FOR_EVER, SAVE_EVERY = 12, 11, 5
RANK = int(os.environ["RANK"])
FIRST_LIFE = os.environ["JITCKPT_RESTART"] == "0"
EVENTS = Path(os.environ["JITCKPT_REHEARSAL_DIR"]) / "ckpt" / "events.jsonl"


known_reasons: set[str] = set()


def times_missed() -> int:
    """Return how often this rank has been told to keep the other waiting."""
    lines = EVENTS.read_text().splitlines() if EVENTS.exists() else []
    return sum('"event": "straggler"' in line and f'"ranks": [{RANK}]' in line for line in lines)


def until_missed(reason: str, rank: int, work: Callable[[], Any]) -> None:
    """Let this rank work until the launcher has found it missing; the other goes on."""
    if rank != RANK or not FIRST_LIFE or reason in known_reasons:
        return
    known_reasons.add(reason)
    before, began = times_missed(), time.monotonic()
    while times_missed() == before:
        work()
    with open("pauses", "a") as file:
        file.write(json.dumps([reason, rank, began, time.monotonic()]) + "\n")


def compile_something() -> None:
    ctypes.PyDLL(None).usleep(50_000)  # holds the GIL


def fetch(batches: "queue.Queue[torch.Tensor]") -> torch.Tensor:
    """Wait for data that another thread gets late."""

    def load() -> None:
        until_missed("data", 1, lambda: time.sleep(0.05))
        batches.put(torch.ones(4, 8))

    late = threading.Thread(target=load)
    late.start()
    return batches.get().to("cuda")


def wait_for_ever() -> None:
    if RANK == 1 and FIRST_LIFE:
        time.sleep(1000)


def write_slowly(write: Callable[..., None]) -> Callable[..., None]:
    """Return it with a wait before it."""

    def waiting(*arguments: Any) -> None:
        until_missed("periodic save", 0, lambda: time.sleep(0.05))
        write(*arguments)

    return waiting


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("replicas",))
    torch.manual_seed(0)
    inner = nn.Linear(8, 8).to("cuda")
    model = DistributedDataParallel(inner, process_group=mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # With a shard given init waits for nobody: one rank may be in a collective before the other is there.
    until_missed("first iteration", 1, lambda: time.sleep(0.05))
    PeriodicSaver._write = write_slowly(PeriodicSaver._write)  # type: ignore[method-assign]
    job = jitckpt.init(model=model, optimizer=optimizer, shard=0, shards=1, save_every=SAVE_EVERY)
    for step in range(job.restore(), STEPS):
        batch = torch.ones(4, 8, device="cuda")
        if step == 1:
            until_missed("compilation", 1, compile_something)
        if step == 2:
            batch = fetch(queue.Queue())
        if step == FOR_EVER:
            wait_for_ever()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step == 3:
            with torch.no_grad():
                until_missed("evaluation", 0, lambda: float(inner(torch.ones(4, 8, device="cuda")).sum()))
            distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
