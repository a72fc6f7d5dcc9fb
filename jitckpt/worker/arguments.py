"""What jitckpt.init is given: looked at, checked, and one object of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from jitckpt.saves.layout import Identity
from jitckpt.state import inner_tensors, parallel
from jitckpt.state.kept import Kept
from jitckpt.state.schedules import Stateful
from jitckpt.wire import environment
from jitckpt.worker.saving.periodic import PeriodicSettings
from jitckpt.worker.saving.saver import SaveFunction
from jitckpt.worker.self_check.comparison import (
    FULL_SELF_CHECK,
    NO_SELF_CHECK,
    SAMPLED_SELF_CHECK,
)

DEEPEST_WRAPPER = 5
AROUND_OPTIMIZERS = (
    "chained_optimizers",  # before the next one, which may be what lies inside of the only one of these
    "optimizer",
    "optimizers",
    "basic_optimizer",
    "optim",
    "base_optimizer",
)


@dataclass(frozen=True)
class Arguments:
    """What a job consists of, and how it is to be protected.

    named_directory: as the script names the directory that is `root`. wrappers: by id() of an optimizer, what
    is around it. self_check: which one. accumulation: micro-batches of a rank in a step, of all ranks. kept:
    what is kept though it was not given; None: nothing is. replicas: ranks on other hosts that hold what this
    one holds, where that decides where its copies in memory go. cut_among: ranks among which in memory is cut
    what they hold alike, this one is among them; none if it is not.
    """

    root: Path
    named_directory: str
    identity: Identity
    save_function: SaveFunction | None
    model: nn.Module | None
    optimizers: list[Optimizer]
    wrappers: Mapping[int, Sequence[object]]
    schedulers: list[Stateful]
    scaler: Any
    extra: Stateful | None
    periodic: PeriodicSettings
    local_state_limit: int
    self_check: str
    accumulation: int = 1
    kept: Kept | None = None
    replicas: Sequence[int] = ()
    cut_among: Sequence[int] = ()


def listed(what: str, given: Any, kind: type) -> list[Any]:
    found = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for item in found:
        if not isinstance(item, kind):
            raise TypeError(
                f"{what} is a {type(item).__name__}; it must be a {kind.__name__} or a list of them."
            )
    return found


def unwrapped(given: Any) -> tuple[list[Optimizer], dict[int, list[object]]]:
    """Return the optimizers of torch's among or inside of what was given, and by id() what is around each."""
    found: list[Optimizer] = []
    around: dict[int, list[object]] = {}

    def look(one: object, wrappers: list[object]) -> None:
        # Some wrappers are optimizers by their class alone and never were made as such.
        if isinstance(one, Optimizer) and "param_groups" in vars(one) and "state" in vars(one):
            if not any(one is known for known in found):
                found.append(one)
                around[id(one)] = wrappers
            return
        for name in AROUND_OPTIMIZERS:
            inner = getattr(one, name, None)
            listed = inner if isinstance(inner, list | tuple) else [inner]
            if inner is not None and len(wrappers) < DEEPEST_WRAPPER and not isinstance(inner, str):
                for part in listed:
                    look(part, [*wrappers, one])
                return
        raise TypeError(
            f"optimizer is a {type(one).__name__}; it must be a torch.optim.Optimizer, a list of them, or an "
            f"object that has them as {', '.join(AROUND_OPTIMIZERS)}."
        )

    for one in [] if given is None else given if isinstance(given, list | tuple) else [given]:
        look(one, [])
    return found, around


def check(
    save_checkpoint: object,
    model: object,
    optimizers: list[Any],
    schedulers: list[Any],
    extra: object,
    *,
    save_every: int | None,
    keep: int,
) -> None:
    if save_checkpoint is None and (model is None or not optimizers):
        raise TypeError("jitckpt.init needs save_checkpoint=..., or model=... and optimizer=...")
    if save_checkpoint is not None and not callable(save_checkpoint):
        raise TypeError(f"save_checkpoint is a {type(save_checkpoint).__name__}; it must be a function.")
    if save_every is not None and (save_every < 1 or save_checkpoint is not None):
        raise ValueError(
            f"save_every is {save_every}; it must be at least 1, and it is for jitckpt's own saves: a save "
            "function can't run beside the training."
        )
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one save has to stay.")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if save_checkpoint is None and isinstance(model, nn.Module):
        for name, parameter in parallel.parameters(model).items():
            _check_kind(f"The parameter {name}", parameter)
        for name, buffer in model.named_buffers():
            _check_kind(f"The buffer {name}", buffer)
    for name, one in [("scheduler", scheduler) for scheduler in schedulers] + [("extra", extra)]:
        if one is not None and not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(f"{name} is a {type(one).__name__}, which has no state_dict and load_state_dict.")


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor of a kind that no save can have."""
    memory = parallel.memory_of(tensor)
    if type(memory) not in (torch.Tensor, nn.Parameter) and (reason := inner_tensors.why_not(memory, name)):
        raise TypeError(reason)


def check_accumulation(accumulation: int) -> None:
    if type(accumulation) is not int or accumulation < 1:
        raise ValueError(f"accumulation is {accumulation!r}; it must be a whole number from 1 on.")


def said_shard(shard: int | None, shards: int | None) -> tuple[int, int] | None:
    """Return both, if they are given; ValueError where they can't be."""
    if shard is None and shards is None:
        return None
    if shard is None or shards is None:
        raise ValueError("Give jitckpt.init both shard and shards, or neither.")
    if not 0 <= shard < shards:
        raise ValueError(f"shard is {shard}; with shards={shards} it must be from 0 to {shards - 1}.")
    return shard, shards


def self_check(given: bool | None) -> str:
    """Return which check to make; a rehearsal asks for all of it."""
    wanted = environment.SELF_CHECK.get()
    if given is None or (given and wanted == FULL_SELF_CHECK):
        return wanted
    return SAMPLED_SELF_CHECK if given else NO_SELF_CHECK


def device_of(model: nn.Module | None) -> tuple[torch.device | None, str | None]:
    """Return the job's device, and why there is nothing to protect if so."""
    if not torch.cuda.is_available():
        return None, "There is no CUDA device; `jitckpt run` or `jitckpt exec` brings one without a GPU."
    if model is None:
        return torch.device("cuda", torch.cuda.current_device()), None
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        places = ", ".join(sorted(map(str, devices))) or "nowhere"
        return None, f"Its model is on {places}; jitckpt protects models on one CUDA device a process."
    return devices.pop(), None
