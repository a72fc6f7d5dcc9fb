"""The saves of one step that together are a job's whole state: one of each shard, every byte checked."""

from collections.abc import Sequence
from pathlib import Path

from jitckpt.errors import CheckpointError
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.selection import SHOWN_REASONS, no_whole_save

Shards = dict[int, dict[int, SaveRecord]]  # by shard and rank


def find(root: Path, step: int | None = None) -> list[SaveRecord]:
    """Return one whole save of each shard, in the shards' order: of this step, or of the newest whole one.

    Raises CheckpointError if there is none; the sentence says why.
    """
    job = folders.read_job(root)
    records = [record for record in folders.find(root) if step in (None, record.step)]
    reasons = [record.problem for record in records if record.problem]
    for one in sorted({record.step for record in records}, reverse=True):
        shards: Shards = {}
        for record in records:
            known = record.metadata
            if record.step == one and record.kind == "rank" and known and known.identity.job == job:
                shards.setdefault(known.identity.shard, {})[record.rank] = record
        found = _one_of_each(shards, one, reasons)
        if found:
            return found
    shown = " ".join(reasons[:SHOWN_REASONS]) or "Nothing of it is saved."
    which = "that is whole" if step is None else str(step)
    raise CheckpointError(f"{root} has no{'' if step is None else ' whole'} step {which}: {shown}")


def _one_of_each(shards: Shards, step: int, reasons: list[str]) -> list[SaveRecord]:
    """Return nothing if a shard has no whole save, and add why to `reasons`."""
    everyone = [
        record.metadata.identity for ranks in shards.values() for record in ranks.values() if record.metadata
    ]
    if not everyone:
        return []
    if len({(one.world_size, one.shards, one.layout) for one in everyone}) > 1:
        reasons.append(f"The saves of step {step} are of different layouts.")
        return []
    missing = [shard for shard in range(everyone[0].shards) if shard not in shards]
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
