"""A job's present state as a JSON document, and back: what a page sends, and another machine shows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jitckpt.reports.present import (
    HangReport,
    MemoryHost,
    Present,
    RankNow,
    RecoveryNow,
    ShardNow,
    Suspect,
)


def as_document(present: Present | None, silent: float | None, problem: str) -> dict[str, Any]:
    """Return all that views show. silent: seconds without a word of the agent; problem: why none is read."""
    document: dict[str, Any] = {"silent": silent, "problem": problem, "job": None}
    if present is not None:
        document["job"] = asdict(present) | {"goodput": present.goodput}
        for shard, shown in zip(present.shards, document["job"]["shards"], strict=True):
            shown["protected"] = shard.protected
    return document


def from_document(document: Mapping[str, Any]) -> tuple[Present | None, float | None, str]:
    """Return what `as_document` was given. Raises ValueError if it is no such document."""
    try:
        job, silent, problem = document["job"], document["silent"], str(document["problem"])
        if job is None:
            return None, silent, problem
        fields = {name: value for name, value in job.items() if name in Present.__dataclass_fields__}
        fields["ranks"] = tuple(RankNow(**one) for one in job["ranks"])
        fields["shards"] = tuple(
            ShardNow(one["number"], tuple(one["ranks"]), tuple(one["living"])) for one in job["shards"]
        )
        fields["groups"] = tuple((str(name), tuple(ranks)) for name, ranks in job["groups"])
        fields["recoveries"] = tuple(
            RecoveryNow(**{**one, "ranks": tuple(one["ranks"])}) for one in job["recoveries"]
        )
        fields["suspects"] = tuple(Suspect(**one) for one in job["suspects"])
        fields["hang_reports"] = tuple(HangReport(**one) for one in job["hang_reports"])
        fields["memory_hosts"] = tuple(
            MemoryHost(
                one["host"],
                tuple(one["ranks"]),
                tuple(one["kept_by"]),
                tuple(one.get("in_parts_on", ())),
            )
            for one in job["memory_hosts"]
        )
        fields["segments"] = tuple((str(what), begin, end) for what, begin, end in job["segments"])
        fields["warnings"] = tuple(job["warnings"])
        return Present(**fields), silent, problem
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no job's state: {error}") from error
