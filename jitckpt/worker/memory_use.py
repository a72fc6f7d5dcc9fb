"""Whether a job uses the memory tier: what the script wants, what the agent has given, what is needed."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitckpt.decisions import memory_wanted
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.saves.layout import Identity
from jitckpt.state.shards import Layout
from jitckpt.system import descriptors
from jitckpt.tiers import asked
from jitckpt.wire import environment
from jitckpt.worker import agreements


def of_job(
    memory: str | Mapping[str, Any] | None, identity: Identity, layout: Layout | None
) -> tuple[Wanted, Sequence[Sequence[int]] | None, Wanted | None]:
    """Return what the script says of the memory tier, and that again if the tier is to be used, else None.

    Between them for each rank who holds the same on another host, where that decides and is known.
    """
    by_script = memory_wanted.by_script("off" if memory is None else memory)
    mode = environment.MEMORY_TIER.get() or by_script.mode
    elsewhere = agreements.replicas_elsewhere(identity, layout) if mode == memory_wanted.AUTOMATIC else None
    is_off = mode == memory_wanted.OFF or (
        mode == memory_wanted.AUTOMATIC and (elsewhere is None or all(elsewhere))
    )
    return by_script, elsewhere, None if is_off else by_script


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
