"""Which step to go on from, and which folders a rank loads: a pure decision over the saves that were found.

Every rank decides for itself from the same files and must come to the same step; so what is verified, and in
which order, depends on nothing but those files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jitckpt.errors import CheckpointError
from jitckpt.layout import Identity
from jitckpt.saves import SaveRecord

SHOWN_REASONS = 8


@dataclass(frozen=True)
class Choice:
    """The step to go on from. `local`: whose folder gives the rank-local state: the rank's own, else None.

    `reasons`: one sentence for each save that was passed over.
    """

    step: int
    save: SaveRecord
    local: SaveRecord | None
    reasons: tuple[str, ...]


def choose(
    records: Sequence[SaveRecord], expected: Identity, verify: Callable[[SaveRecord], str | None]
) -> Choice | None:
    """Return what the rank `expected.rank` loads; None if there is no finished save at all (a fresh start).

    The newest step is taken for which every shard has a whole save. `verify` returns why a save is not whole;
    it is asked only about saves that matter. Raises CheckpointError if there are finished saves but none that
    can be used.
    """
    reasons: list[str] = []
    saves = [record for record in records if record.kind == "rank"]
    usable = [record for record in saves if not _noted(reasons, record, misfit(record, expected))]
    verdicts: dict[SaveRecord, bool] = {}

    def whole(record: SaveRecord) -> bool:
        if record not in verdicts:
            verdicts[record] = not _noted(reasons, record, verify(record))
        return verdicts[record]

    for step in sorted({record.step for record in usable}, reverse=True):
        of_step = [record for record in usable if record.step == step]
        missing = [
            shard
            for shard in range(expected.shards)
            if not any(_shard(record) == shard and whole(record) for record in sorted(of_step, key=_rank))
        ]
        if missing:
            reasons.append(f"Step {step} has no whole save of shard {', '.join(map(str, missing))}.")
            continue
        mine = [record for record in of_step if _shard(record) == expected.shard]
        save = next(filter(whole, _own_first(mine, expected.rank)))
        return Choice(step, save, _local(records, save, expected, reasons, verify), tuple(reasons))
    if any(record.finished for record in saves):
        raise CheckpointError(_nothing_usable(reasons, expected))
    return None


def _local(
    records: Sequence[SaveRecord],
    save: SaveRecord,
    expected: Identity,
    reasons: list[str],
    verify: Callable[[SaveRecord], str | None],
) -> SaveRecord | None:
    if save.rank == expected.rank:
        return save
    for record in records:
        if (record.kind, record.step, record.rank) == ("local", save.step, expected.rank) and not _noted(
            reasons, record, misfit(record, expected) or verify(record)
        ):
            return record
    return None


def misfit(record: SaveRecord, expected: Identity) -> str | None:
    """Return why a save can't belong to this job, None if it does."""
    if record.metadata is None:
        return record.problem or f"{record.path} has no metadata."
    found, why = record.metadata.identity, None
    if found.job != expected.job:
        why = f"of another job ({found.job} instead of {expected.job})"
    elif found.world_size != expected.world_size:
        why = f"of a job with {found.world_size} ranks; this one has {expected.world_size}"
    elif "" not in (found.layout, expected.layout) and found.layout != expected.layout:
        why = f"of a job that is laid out as '{found.layout}'; this one is as '{expected.layout}'"
    elif found.shards != expected.shards:
        why = f"of a job with {found.shards} shards; this one has {expected.shards}"
    elif found.shard == expected.shard and expected.fingerprint not in ("", found.fingerprint):
        why = "of another model or optimizer (names, shapes, types or parts differ)"
    return None if why is None else f"{record.path} is {why}."


def _own_first(records: Sequence[SaveRecord], rank: int) -> list[SaveRecord]:
    """The rank's own save first; then the others, from a place that differs by rank, to share the reading."""
    others = sorted((record for record in records if record.rank != rank), key=_rank)
    start = rank % len(others) if others else 0
    return [record for record in records if record.rank == rank] + others[start:] + others[:start]


def _noted(reasons: list[str], record: SaveRecord, problem: str | None) -> bool:
    if problem is not None:
        reasons.append(problem)
    return problem is not None


def _shard(record: SaveRecord) -> int:
    return record.metadata.identity.shard if record.metadata else -1


def _rank(record: SaveRecord) -> int:
    return record.rank


def _nothing_usable(reasons: Sequence[str], expected: Identity) -> str:
    shown = " ".join(reasons[:SHOWN_REASONS])
    more = f" (and {len(reasons) - SHOWN_REASONS} more)" if len(reasons) > SHOWN_REASONS else ""
    return (
        f"The checkpoint directory holds saves, but none that rank {expected.rank} of {expected.world_size} "
        f"can use: {shown}{more} Start the job as it was, or begin anew in another directory."
    )
