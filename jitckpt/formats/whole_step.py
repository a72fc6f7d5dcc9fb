"""The saves of one step that together are a job's whole state: one of each shard, every byte checked."""

from collections.abc import Sequence
from pathlib import Path

from jitckpt.errors import CheckpointError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import SHOWN_REASONS, no_whole_save

Shards = dict[int, dict[int, SaveRecord]]  # by shard and rank
Layout = tuple[int, int, str]


def find(root: Path, step: int | None = None) -> list[SaveRecord]:
    """Return one whole save of each shard, in the shards' order: of this step, or of the newest whole one.

    Raises CheckpointError if there is none; the sentence says why.
    """
    job = folders.read_job(root)
    records = [record for record in folders.find(root) if step in (None, record.step)]
    reasons = [record.problem for record in records if record.problem]
    for one in sorted({record.step for record in records}, reverse=True):
        # A job that has gone on in another layout may have left some of a step that it came to once more.
        layouts: dict[Layout, Shards] = {}
        times: dict[Layout, float] = {}
        for record in records:
            known = record.metadata
            if record.step == one and record.kind == "rank" and known and known.identity.job == job:
                of = laid_out(known.identity)
                layouts.setdefault(of, {}).setdefault(known.identity.shard, {})[record.rank] = record
                times[of] = max(known.time, times.get(of, 0.0))
        for of in sorted(layouts, key=times.__getitem__, reverse=True):
            if found := _one_of_each(layouts[of], of[1], one, reasons):
                return found
    shown = " ".join(reasons[:SHOWN_REASONS]) or "Nothing of it is saved."
    which = "that is whole" if step is None else str(step)
    raise CheckpointError(f"{root} has no{'' if step is None else ' whole'} step {which}: {shown}")


def laid_out(identity: Identity) -> Layout:
    """Return how the state is spread over ranks."""
    return identity.world_size, identity.shards, identity.layout


def _one_of_each(shards: Shards, count: int, step: int, reasons: list[str]) -> list[SaveRecord]:
    """Return nothing if one of so many shards has no whole save, and add why to `reasons`."""
    missing = [shard for shard in range(count) if shard not in shards]
    found: list[SaveRecord] = []
    for shard, ranks in sorted(shards.items()) if not missing else []:
        whole = _first_whole([ranks[rank] for rank in sorted(ranks)], reasons)
        if whole is None:
            missing.append(shard)
        else:
            found.append(whole)
    if missing:
        reasons.append(f"Step {step} has {no_whole_save(missing)}.")
        return []
    return found


def _first_whole(replicas: Sequence[SaveRecord], reasons: list[str]) -> SaveRecord | None:
    for record in replicas:
        problem = folders.verify(record)
        if problem is None:
            return record
        reasons.append(problem)
    return None
