"""Whether a host makes the optimizer step of a device bit for bit, and how fast (what REFT's AOR rests on).

    python scripts/bench/host_step.py [--elements 1000003] [--steps 5] [--device cuda] [--json]

For SGD with momentum, Adam and AdamW, each as a loop, foreach and fused: the device makes steps with random
gradients. Before each, parameter, state and gradient are copied to the host, which makes the same step in
each of the three ways. Said is which of those gave the device's bits in all steps; of each other one the
tensor that differs first, in how many elements. The host's time is that of the quickest way that gives the
device's bits: seconds of one core, which others that use the machine don't change much. Without a GPU
--device cpu compares the host's ways with each other.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.001, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.001, "weight_decay": 0.01}),
}
WAYS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def tensors(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield "parameter", parameter.detach()
    for name, value in sorted(optimizer.state[parameter].items()):
        if isinstance(value, Tensor):
            yield name, value


def on_host(
    optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Tensor, way: str
) -> tuple[list[tuple[str, Tensor]], float]:
    """Return what the step makes of a copy on the host, and the seconds."""
    own = torch.nn.Parameter(parameter.detach().cpu().clone())
    kind, options = OPTIMIZERS[type(optimizer).__name__]
    same = kind([own], **options, **WAYS[way])
    same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same.param_groups[0].update(WAYS[way])
    for value in same.state[own].values():
        assert not isinstance(value, Tensor) or value.device.type == "cpu"
    own.grad = gradient.cpu().clone()
    began = time.process_time()
    same.step()
    return list(tensors(own, same)), time.process_time() - began


def difference(there: list[tuple[str, Tensor]], here: list[tuple[str, Tensor]]) -> str:
    """Return the first tensor that is not the same bit for bit; "" if all are."""
    for (name, device), (_, host) in zip(there, here, strict=True):
        unlike = device.cpu().view(-1).view(torch.uint8) != host.view(-1).view(torch.uint8)
        if count := int(unlike.view(-1, device.element_size()).any(1).sum()):
            return f"{name} ({count} of {device.numel()} elements)"
    return ""


def measured(name: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in the memory tier
    kind, options = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.randn(args.elements, device=args.device))
    optimizer = kind([parameter], **options, **WAYS[way])
    differs = dict.fromkeys(WAYS, "")
    seconds = dict.fromkeys(WAYS, float("inf"))
    for step in range(args.steps):
        gradient = torch.randn(args.elements, device=args.device)
        found = {host: on_host(optimizer, parameter, gradient, host) for host in WAYS}
        parameter.grad = gradient
        optimizer.step()
        there = list(tensors(parameter, optimizer))
        for host, (here, took) in found.items():
            differs[host] = differs[host] or difference(there, here)
            if step:  # the first one makes the state
                seconds[host] = min(seconds[host], took)
    alike = [seconds[way] for way, first in differs.items() if not first]
    micro = min(alike, default=float("nan")) * 1e6 / (args.elements / 1e6)
    return {"differs": differs, "microseconds_per_million": micro}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_003, help="of the parameter")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {f"{name}, {way}": measured(name, way, args) for name in OPTIMIZERS for way in WAYS}
    if args.json:
        print(json.dumps(found))
        return
    for of, numbers in found.items():
        same = [way for way, first in numbers["differs"].items() if not first]
        other = "; ".join(f"{way}: {first}" for way, first in numbers["differs"].items() if first)
        micro = numbers["microseconds_per_million"]
        print(f"{of:15} the same as the host's {' and '.join(same) or 'none'} ({micro:.0f} us/M). {other}")


if __name__ == "__main__":
    main()
