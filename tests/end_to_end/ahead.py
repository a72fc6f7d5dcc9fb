"""A training that is minibatches ahead of its device, with a save function as everybody would write it.

Run by test_save_function.py as a process of its own; its options are a JSON object in argv[1], what it ends
with goes to standard output as JSON.
"""

import ctypes
import json
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from training import digest

import jitckpt

OPTIONS = {
    "directory": "ckpt",
    "steps": 40,
    "blocked": None,  # after this step the device stands still until there is the file "go"
    "ahead": 5,  # so many steps later there is the file "waiting"
    "optimizers": 1,
    "schedulers": True,
    "scaler": False,  # waits for the device in each step
    "given": ["model", "optimizer", "scheduler", "scaler"],  # to jitckpt.init
    "works_on_host": False,  # then, as soon as there is the file "waiting", until there is the file "go"
    "several_steps": False,  # the second optimizer makes two steps in each minibatch
}
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Decay(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler with a function that is an object with a state."""

    class Function:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, step: int) -> float:
            self.calls += 1
            return 0.97**step

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, self.Function())


def main() -> None:  # noqa: PLR0912, PLR0915
    options = OPTIONS | json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    folder = Path(options["directory"])
    torch.manual_seed(1)
    random.seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4)).to("cuda")
    parts = [model] if options["optimizers"] == 1 else [model[0], model[3]]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parts[0].parameters(), lr=1e-2),
        *(torch.optim.NAdam(part.parameters(), lr=1e-2) for part in parts[1:]),
    ]
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []
    if options["schedulers"]:
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.05, total_steps=options["steps"])
        schedulers = [one_cycle, *map(Decay, optimizers[1:])]
    scaler = GradScaler("cuda", init_scale=2.0**14, growth_interval=3) if options["scaler"] else None
    said: list[str] = []

    def save(context: jitckpt.SaveContext) -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [one.state_dict() for one in optimizers],
            "schedulers": [one.state_dict() for one in schedulers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "rates": [one.get_last_lr() for one in schedulers],
            "random": [random.getstate(), torch.get_rng_state()],
        }
        torch.save(state, context.directory / "state.pt")
        said.append(f"saved {context.step}")

    every = {"model": model, "optimizer": optimizers, "scheduler": schedulers, "scaler": scaler}
    given: dict[str, Any] = {name: every[name] for name in options["given"]}
    job = jitckpt.init(save, checkpoint_dir=folder, **given)
    path = jitckpt.jit_get_checkpoint_path(folder)
    restored: dict[str, Any] = {}
    if path is not None:
        state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        for one, saved in zip(optimizers, state["optimizers"], strict=True):
            one.load_state_dict(saved)
            restored["steps"] = sorted({float(values["step"]) for values in saved["state"].values()})
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])
        random.setstate(state["random"][0])
        torch.set_rng_state(state["random"][1])
        restored["drawn"] = [random.random(), float(torch.rand(1))]
        restored["rates"] = state["rates"]
    start = job.restore()

    def wait_for_go(_: object) -> None:
        while not (folder / "go").exists():
            time.sleep(0.01)

    wait = HOST_FUNCTION(wait_for_go)

    for step in range(start, options["steps"]):
        if step == options["blocked"]:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert ctypes.CDLL(None).cudaLaunchHostFunc(stream, wait, None) == 0
        if options["blocked"] is not None and step == options["blocked"] + options["ahead"]:
            (folder / "waiting").touch()
            while options["works_on_host"] and not (folder / "go").exists():
                assert not said or float(optimizers[0].state_dict()["state"][0]["step"]) == step
                time.sleep(0.01)
        batch = (torch.randn(8, 16) + random.random()).to("cuda", non_blocking=True)
        loss = model(batch).square().mean()
        if scaler is not None and step % 7 == 5:
            loss = loss * float("inf")  # a step that the scaler skips
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if options["several_steps"]:
            optimizers[1].step()
        if scaler is not None:
            scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    result = {
        "start": start,
        "restored": restored,
        "said": said,
        "model": digest(model.state_dict()),
        "optimizer": digest([optimizer.state_dict() for optimizer in optimizers]),
        "scheduler": digest([scheduler.state_dict() for scheduler in schedulers]),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": [random.random(), float(torch.rand(1)), float(torch.rand(1, device="cuda"))],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
