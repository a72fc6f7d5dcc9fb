"""A training on one device that never waits for it, run by test_job_single_rank.py as a process of its own.

Its options are a JSON object in argv[1]; what it ends with goes to standard output as JSON.
"""

import hashlib
import json
import math
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import jitckpt
from jitckpt.worker.saving import saver

OPTIONS = {
    "directory": "ckpt",
    "steps": 60,
    "model": "mlp",  # or convnet
    "micro_batches": 2,
    "scaler": False,
    "wait_in_step": None,  # after this optimizer step, before scaler and scheduler, wait for the file "go"
    # Wait without a device call: for "data" before the next step, or in an "evaluation" before the scaler and
    # the scheduler. The saver would wait for the thread's next call for ever.
    "asleep": None,
    "callback": None,  # None, or what it does: save, raise, exit, collective
    "largest_file": None,  # bytes, once training has begun
    "local_state_limit": 64 << 20,
    "pause": 0.0,  # seconds between steps
    "optimizers": 1,
    "constant_rate": False,  # no scheduler, and a loader without state
    "bare": False,  # init gets nothing but the save function
    "wait_at_start": False,  # before the first step, for the file "go"
}


class Loader:
    """Random batches; its state is how many it gave."""

    def __init__(self, shape: tuple[int, ...], counts: bool) -> None:
        self.shape, self.counts, self.position = shape, counts, 0

    def next(self) -> Tensor:
        self.position += self.counts
        offset = random.random() + self.position / 100
        return torch.randn(self.shape).add_(offset).to("cuda", non_blocking=True)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def build(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    if kind == "convnet":
        body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        return nn.Sequential(body, nn.Dropout(0.2), nn.Linear(512, 4)).to("cuda"), (4, 3, 8, 8)
    layers = [nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 4)]
    return nn.Sequential(*layers).to("cuda"), (8, 16)


def digest(value: Any) -> str:
    """A hash of nested state, by the bytes of its tensors."""
    parts = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            parts.update(str((item.dtype, item.shape)).encode())
            parts.update(item.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key, inner in item.items():
                parts.update(repr(key).encode())
                add(inner)
        elif isinstance(item, list | tuple):
            for inner in item:
                add(inner)
        else:
            parts.update(repr(item).encode())

    add(value)
    return parts.hexdigest()


def save_function(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def save(context: jitckpt.SaveContext) -> None:
        if what == "raise":
            raise ValueError("the save function does not want to")
        if what == "exit":
            sys.exit(3)
        if what == "collective":
            torch.distributed.all_reduce(torch.ones(1, device="cuda"))
        state = optimizer.state_dict()
        for number, values in context.host_state["optimizers"][0]["state"].items():
            state["state"][number].update(values)
        weights = {name: value.cpu() for name, value in model.state_dict().items()} | {
            name: value for name, value in context.host_state.get("buffers", {}).items()
        }
        torch.save({"model": weights, "optimizer": state["state"]}, context.directory / "mine.pt")
        (context.directory / "step").write_text(str(context.step))

    return save


def wait_for_go(folder: Path) -> None:
    torch.cuda.synchronize()
    (folder / "waiting").touch()
    while not (folder / "go").exists():
        torch.cuda.synchronize()
        time.sleep(0.01)


def sleep_until_go(folder: Path, weights: dict[str, Tensor]) -> None:
    """Work on the host alone."""
    (folder / "waiting").touch()
    while not (folder / "go").exists():
        for weight in weights.values():
            weight.double().square().sum().item()
        time.sleep(0.01)


def main() -> None:  # noqa: PLR0912, PLR0915
    options = OPTIONS | json.loads(sys.argv[1])
    torch.manual_seed(1)
    random.seed(1)
    torch.backends.cudnn.enabled = False  # batch normalisation by torch's own kernel
    model, shape = build(options["model"])
    loader = Loader(shape, counts=not options["constant_rate"])
    parameters = list(model.parameters())
    groups = [parameters] if options["optimizers"] == 1 else [parameters[:2], parameters[2:]]
    optimizers = [torch.optim.AdamW(group, lr=1e-2, amsgrad=True) for group in groups]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.05, total_steps=options["steps"])
        for one in ([] if options["constant_rate"] else optimizers)
    ]
    scaler = GradScaler("cuda", init_scale=2.0**14, growth_interval=3) if options["scaler"] else None
    if options["callback"] == "collective":
        store = f"file://{options['directory']}.store"
        torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1, device="cuda"))
    callback = options["callback"] and save_function(options["callback"], model, optimizers[0])
    objects: dict[str, Any] = {
        "model": model,
        "optimizer": optimizers,
        "scheduler": schedulers,
        "scaler": scaler,
        "extra": loader,
        "local_state_limit": options["local_state_limit"],
    }
    if options["bare"]:
        objects = {}
    job = jitckpt.init(callback, checkpoint_dir=options["directory"], **objects)
    path = jitckpt.jit_get_checkpoint_path(options["directory"]) if callback else None
    if path is not None:
        mine = torch.load(os.path.join(path, "mine.pt"))
        model.load_state_dict(mine["model"])
        optimizers[0].load_state_dict(optimizers[0].state_dict() | {"state": mine["optimizer"]})
    start = job.restore()
    if options["wait_at_start"]:
        wait_for_go(Path(options["directory"]))
    if options["largest_file"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["largest_file"],) * 2)
    if options["asleep"]:
        saver.PARK_SECONDS = math.inf
    for step in range(start, options["steps"]):
        for _ in range(options["micro_batches"]):
            loss = model(loader.next()).square().mean() / options["micro_batches"]
            if scaler is not None and step % 7 == 5:
                loss = loss * float("inf")  # a step that the scaler skips
            (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            if scaler is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
        waits = step + 1 == options["wait_in_step"]
        if waits and options["asleep"] is None:
            wait_for_go(Path(options["directory"]))
        if waits and options["asleep"] == "evaluation":
            on_host = {name: value.cpu() for name, value in model.state_dict().items()}
            sleep_until_go(Path(options["directory"]), on_host)
        if scaler is not None:
            scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if waits and options["asleep"] == "data":
            sleep_until_go(Path(options["directory"]), {})
        time.sleep(options["pause"])
    result = {
        "start": start,
        "model": digest(model.state_dict()),
        "optimizer": digest([optimizer.state_dict() for optimizer in optimizers]),
        "scheduler": digest([scheduler.state_dict() for scheduler in schedulers]),
        "scaler": None if scaler is None else scaler.state_dict(),
        "position": loader.position,
        "random": [random.random(), float(torch.rand(1)), float(torch.rand(1, device="cuda"))],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
