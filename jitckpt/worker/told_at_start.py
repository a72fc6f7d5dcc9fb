"""What the first rank tells as a job starts: who is there, its batch, the memory tier, what is at risk."""

import os
from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from pathlib import Path

from torch.optim import Optimizer

from jitckpt.console import say
from jitckpt.decisions import elastic, memory_wanted, replicas
from jitckpt.errors import SaveError
from jitckpt.saves import start_record
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.state.shards import Layout
from jitckpt.wire import environment
from jitckpt.worker import agreements
from jitckpt.worker.memory_use import MemoryUse
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.saving.saver import SaveFunction


def of_start(
    reporter: Reporter,
    root: Path,
    identity: Identity,
    optimizers: Sequence[Optimizer],
    *,
    save: SaveRecord | None,
    step: int,
    is_protected: bool,
) -> None:
    """The first start of a run says who is there, what it goes on from, how it differs from the last."""
    if identity.rank != 0 or environment.RESTART.get() > 0:
        return
    now = start_record.settings([*optimizers])
    if is_protected:
        say(start_record.who_is_there(identity.world_size, identity.shards, root))
    try:
        if save is not None and save.metadata is not None:
            for sentence in start_record.told(root, step, save.metadata.time, identity.job, now):
                say(sentence)
        start_record.note_start(root, now, identity.start)
    except (OSError, SaveError) as error:
        reporter.warn(f"How this start was made can't be noted in {root}: {error}")


def all_ranks(ranks: int) -> int:
    """Return how many ranks there are when no host is missing."""
    return environment.FULL_WORLD.get() or ranks


def of_batch(reporter: Reporter, identity: Identity, accumulation: int) -> None:
    """While hosts are missing: say what becomes of the global batch."""
    ranks = identity.world_size
    everyone = all_ranks(ranks)
    if ranks == everyone or identity.rank != 0:
        return
    part = elastic.part_of_batch(accumulation, everyone, ranks)
    here = f"{ranks} of {everyone} ranks are here, and"
    goes_by = "a script that goes by job.accumulation_steps"
    if part == 1:
        each = elastic.micro_batches(accumulation, everyone, ranks)
        told = (
            f"{here} in {goes_by} each makes {each} micro-batches a step in the place of {accumulation}: the "
            f"global batch stays as it is. In another script it is {ranks}/{everyone} of that."
        )
    else:
        told = (
            f"{here} {accumulation * everyone} micro-batches a step can't be dealt out to them evenly: the "
            f"global batch is now {part} of what it was in {goes_by}, in another one "
            f"{Fraction(ranks, everyone)}. With accumulation={_dividing(accumulation, everyone, ranks)} in "
            "jitckpt.init, and smaller micro-batches, it would stay."
        )
    reporter.warn(told)


def _dividing(accumulation: int, everyone: int, ranks: int) -> int:
    """Return the least multiple of `accumulation` that both numbers of ranks can share."""
    return accumulation * (ranks // gcd(ranks, accumulation * everyone))


def of_memory(reporter: Reporter, identity: Identity, use: MemoryUse, *, has_tier: bool) -> None:
    """Say what `auto` has come to, and why; and why there is no memory tier, where somebody might miss it."""
    if identity.rank != 0:
        return
    if use.elsewhere is not None and environment.RESTART.get() == 0:
        if use.needed is None:
            say(
                "memory tier: nothing is kept in memory, since each rank's state has a replica on another "
                "host (another device, where there is one host): these save just in time."
            )
        elif has_tier:
            hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
            kept = replicas.in_words(use.elsewhere, hosts, use.why_cut)
            say(f"memory tier: {kept} (--memory-tier auto).")
    if use.by_script.mode != memory_wanted.OFF and use.needed is not None and not has_tier:
        reporter.warn(
            "There is no memory tier, for which jitckpt.init(memory=...) asks: `jitckpt run` has one in user "
            "mode, where --memory-tier off does not say otherwise."
        )


def of_risk(
    reporter: Reporter,
    identity: Identity,
    layout: Layout | None,
    save_function: SaveFunction | None,
    save_every: int | None,
    *,
    has_tier: bool,
) -> None:
    if (
        identity.rank == 0
        and save_every is None
        and (risk := _risk(layout, save_function, has_tier=has_tier))
    ):
        reporter.warn(risk)


def _risk(layout: Layout | None, save_function: SaveFunction | None, *, has_tier: bool) -> str | None:
    """Return why a rank's state is lost with it, if so: no file, no other host's memory has it."""
    if layout is None or not layout.alone():
        return None
    if not has_tier:
        return agreements.without_replicas(layout)
    if save_function is None:
        return None
    return (
        "The memory tier can't protect a job that has a save function of its own: it keeps what jitckpt's "
        "own saver saves. Give jitckpt.init model and optimizer in its place."
    )
