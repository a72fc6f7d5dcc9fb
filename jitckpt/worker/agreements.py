"""What the ranks find out together through torch's store: who holds what, and what to go on from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from jitckpt.decisions import replicas
from jitckpt.saves import folders, same_step, selection
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice
from jitckpt.state import parallel
from jitckpt.state.shards import Layout, agree, any_rank, hear_first, through_first
from jitckpt.state.unwrapping import unwrapped
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.wire import environment
from jitckpt.worker import advice


def job_store() -> Store:
    """Return the store that the ranks of the job share; there is one once they are a process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def store_of_ranks() -> Store | None:
    """Return the store that the ranks share; None where there is one rank, which needs no agreement."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    return job_store() if initialised and torch.distributed.get_world_size() > 1 else None


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def on_several_hosts() -> bool:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def all_say(said: Any) -> list[Any]:
    """Return what all ranks say here, by rank: each has to call it. For plain values that JSON holds."""
    rank, world_size = place()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [said]
    store = job_store()
    told: list[Any] = json.loads(
        through_first(
            store,
            "said by all",
            rank,
            world_size,
            value=json.dumps(said),
            decide=lambda values: json.dumps([json.loads(value) for value in values]),
        )
    )
    return told


def told_by_first(what: str, rank: int, value: str) -> str | None:
    """Return what rank 0 gives as `value`; None where all ranks are on one host, which needs no agreement."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (on_several_hosts() and initialised):
        return None
    return hear_first(job_store(), what, rank, value)


def on_some_rank(identity: Identity, value: bool) -> bool:
    """Return whether it is so on some rank, where there are several hosts."""
    if not environment.COPIES_FD.is_set() or not torch.distributed.is_initialized():
        return False
    store = job_store()
    return any_rank(store, "a device keeps a state of its own", identity.rank, identity.world_size, value)


def layout_of(
    rank: int, world_size: int, model: nn.Module | None, optimizers: list[Optimizer]
) -> Layout | None:
    """Return which rank holds which part of the state; None where there is nothing to find that out from."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if model is None or not initialised or world_size == 1:
        return None
    store = job_store()
    held = parallel.holding(unwrapped(model), optimizers)
    return agree(store, rank, world_size, held)


def without_replicas(layout: Layout) -> str:
    ranks = layout.alone()
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return (
        f"Part of this job's state has no replica: {len(ranks)} of its {len(layout.shards)} ranks ({shown}) "
        f"hold alone what they hold ({layout.text}). When one of these is lost, its part can't be saved any "
        "more, and the job goes back to an older step: start it with `jitckpt run --memory-tier auto`, which "
        f"keeps it in host memory after each step, or {advice.current().save_every}, so that there is one."
    )


def replicas_elsewhere(identity: Identity, layout: Layout | None) -> list[tuple[int, ...]] | None:
    """Return for each rank who holds the same on another host (decisions/replicas.py); None: nobody knows.

    Every rank has to call it.
    """
    if layout is None and identity.shards == 1 < identity.world_size:
        return None
    told = all_say([identity.shard, int(os.environ.get("GROUP_RANK", "0"))])
    return replicas.elsewhere([shard for shard, _ in told], [host for _, host in told])


def choice(
    root: Path,
    identity: Identity,
    *,
    several_hosts: bool,
    memory: OwnShard | None = None,
    warn: Callable[[str], None],
) -> Choice | None:
    """Return what this rank goes on from; None for a fresh start. Raises CheckpointError.

    Where what this rank could see does not decide for all, they agree: then every rank has to call it.
    """
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    if initialised and (identity.shards > 1 or several_hosts or memory is not None):
        store = job_store()
        return same_step.together(store, root, identity, memory, warn)
    if identity.shards > 1:
        return selection.choose(folders.find(root), identity, folders.verify, warn)
    return same_step.alone(root, identity)
