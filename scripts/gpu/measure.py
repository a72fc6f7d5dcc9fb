"""One measurement in a process of its own; prints one JSON object. usage: measure.py WHAT SIZE [FOLDER]

launches: seconds of a small kernel's launch.
step: seconds of a GPT's training step; FOLDER makes it protected.
copy: bytes a second from the device to pinned memory, and of torch.save to FOLDER.
kernels: how many the profiler counts in one step, by name, and how many launches the libraries before and
after jitckpt's have counted in it.
allocations: how often device memory was asked for, of CUDA or of torch's allocator: until a save into FOLDER
began, and until it was written.
"""

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

import jitckpt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT

# 124 million parameters, as GPT-2; and one that softgpu trains in milliseconds.
SIZES = {
    "large": Namespace(width=768, length=1024, layers=12, heads=12, dropout=0.0, steps=64, batch=16),
    "small": Namespace(width=64, length=32, layers=2, heads=2, dropout=0.0, steps=64, batch=2),
}
KINDS_OF_TOKEN = 50_257


class Training:
    """A GPT on one device; bf16 in the products."""

    def __init__(self, size: str) -> None:
        self.args = SIZES[size]
        self.tokens = KINDS_OF_TOKEN if size == "large" else 100
        torch.manual_seed(0)
        self.model = GPT(self.tokens, self.args).to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        shape = (self.args.batch, self.args.length + 1)
        self.batch = torch.randint(0, self.tokens, shape, device="cuda")

    def step(self, number: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.batch, number, 1)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def launches(_size: str) -> dict[str, float]:
    value = torch.ones(1, device="cuda")
    number, rounds = 2000, []
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(number):
            value.add_(1)
        rounds.append((time.perf_counter() - began) / number)
        torch.cuda.synchronize()
    return {"seconds": statistics.median(rounds)}


def step(size: str, folder: str | None = None) -> dict[str, float]:
    training = Training(size)
    if folder is not None:
        jitckpt.init(checkpoint_dir=folder, model=training.model, optimizer=training.optimizer)
    times = []
    for number in range(35):
        torch.cuda.synchronize()
        began = time.perf_counter()
        training.step(number)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    return {"seconds": statistics.median(times[10:]), "parameters": parameters}


def copy(size: str, folder: str) -> dict[str, float]:
    number = (1 << 30) if size == "large" else (16 << 20)
    device = torch.zeros(number, dtype=torch.uint8, device="cuda")
    host = torch.empty(number, dtype=torch.uint8, pin_memory=True)
    copies, saves = [], []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        torch.save(device, Path(folder) / "saved.pt")
        saves.append(time.perf_counter() - began)
        (Path(folder) / "saved.pt").unlink()
    return {"copy": number / statistics.median(copies), "torch_save": number / statistics.median(saves)}


def kernels(size: str) -> dict[str, Any]:
    training = Training(size)
    for number in range(3):
        training.step(number)
    torch.cuda.synchronize()
    before, after = counters()
    counted: Counter[str] = Counter()
    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            training.step(3)
            torch.cuda.synchronize()
        for event in profile.events() or ():
            if event.device_type == DeviceType.CUDA and not event.name.startswith("Mem"):
                counted[event.name] += 1
    else:
        training.step(3)
        torch.cuda.synchronize()
    last_before, last_after = counters()
    return {"before": last_before - before, "after": last_after - after, "profiler": dict(counted)}


def allocations(size: str, folder: str) -> dict[str, int]:
    """The save is one that SIGTERM asks for, as no agent is there; the handler runs once it is written."""
    from_cuda = ctypes.CDLL(None).allocations_after_jitckpt

    def asked_for() -> int:
        return int(from_cuda()) + int(torch.cuda.memory_stats()["allocation.all.allocated"])

    after_save: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: after_save.append(asked_for()))
    training = Training(size)
    jitckpt.init(checkpoint_dir=folder, model=training.model, optimizer=training.optimizer)
    for number in range(10):
        training.step(number)
    torch.cuda.synchronize()
    before_save = asked_for()
    os.kill(os.getpid(), signal.SIGTERM)
    while not after_save:
        torch.cuda.synchronize()
    saved = sum(path.stat().st_size for path in Path(folder).glob("step-*/rank-00000/tensors.safetensors"))
    return {"before": before_save, "in_save": after_save[0] - before_save, "saved": saved}


def counters() -> tuple[int, int]:
    everything = ctypes.CDLL(None)
    return everything.launches_before_jitckpt(), everything.launches_after_jitckpt()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
