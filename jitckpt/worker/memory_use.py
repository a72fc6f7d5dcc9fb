"""Whether a job uses the memory tier: what the script wants, what the agent has given, what is needed."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from jitckpt.decisions import cut, memory_wanted
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.saves.layout import Identity
from jitckpt.state.expected_size import least_bytes
from jitckpt.state.shards import Layout
from jitckpt.system import descriptors
from jitckpt.tiers import asked
from jitckpt.wire import environment
from jitckpt.worker import agreements


@dataclass(frozen=True)
class MemoryUse:
    """by_script: what the script says of the memory tier; needed: that again if it is to be used, else None.

    elsewhere: for each rank who holds the same on another host, where that decides and is known. cut_among:
    the ranks that hold what this one holds, if that is to be cut among them in host memory; why_cut: in
    words, where that was chosen and some ranks do so.
    """

    by_script: Wanted
    needed: Wanted | None
    elsewhere: Sequence[Sequence[int]] | None
    cut_among: Sequence[int] = ()
    why_cut: str = ""

    def replicas_of(self, rank: int) -> Sequence[int]:
        return self.elsewhere[rank] if self.elsewhere else ()


def of_job(
    memory: str | Mapping[str, Any] | None,
    identity: Identity,
    layout: Layout | None,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
) -> MemoryUse:
    """Return whether and how a job uses the memory tier. Every rank has to call it."""
    by_script = memory_wanted.by_script("off" if memory is None else memory)
    mode = environment.MEMORY_TIER.get() or by_script.mode
    elsewhere = agreements.replicas_elsewhere(identity, layout) if mode == memory_wanted.AUTOMATIC else None
    is_off = mode == memory_wanted.OFF or (
        mode == memory_wanted.AUTOMATIC and (elsewhere is None or all(elsewhere))
    )
    if is_off:
        return MemoryUse(by_script, None, elsewhere)
    return MemoryUse(by_script, by_script, elsewhere, *_cut_among(identity, model, optimizers))


def _cut_among(
    identity: Identity, model: nn.Module | None, optimizers: Sequence[Optimizer]
) -> tuple[Sequence[int], str]:
    """Return MemoryUse's cut_among and why_cut."""
    mode = environment.MEMORY_TIER.get()
    if mode == memory_wanted.SHARDED and identity.world_size > 1:
        return cut.members(agreements.all_say(identity.shard), identity.rank), ""
    if mode != memory_wanted.AUTOMATIC or not agreements.on_several_hosts():
        return (), ""
    said = [
        identity.shard,
        int(os.environ.get("GROUP_RANK", "0")),
        least_bytes(model, optimizers),
        environment.MEMORY_LIMIT.get(),
    ]
    of_ranks = [cut.RanksRoom(*one) for one in agreements.all_say(said)]
    chosen, shards = cut.for_room(of_ranks, Wanted(mode).copies), [one.shard for one in of_ranks]
    found = cut.members(shards, identity.rank) if identity.shard in chosen else ()
    return found, cut.in_words(of_ranks, chosen) if chosen else ""


def given_by_agent(rank: int, memory: Wanted | None) -> descriptors.GivenDescriptors | None:
    """Return what the agent has given this process; None, with a warning, if that is not there to be used."""
    try:
        given = descriptors.claim(rank)
        if given is None or memory is None:
            return given if given is None else replace(given, memory=None)
        if given.memory is not None and not environment.MEMORY_TIER.get():
            asked.ask(given.memory, memory)
        return given
    except descriptors.NotOursError as error:
        warnings.warn(
            f"jitckpt: {error} So rank {rank} runs as without an agent: it saves by itself when it is sent "
            "SIGTERM or sees a hang, nothing is kept of what only this rank knows (random numbers, data "
            "position) if it dies, and an exception of its own ends it without a save by the others. Have "
            "`jitckpt run --nproc-per-node N` start each rank's Python itself.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
