"""A diagnosis of a hang in the format of torch's flight recorder, as torchfrtrace reads it. Pure.

The recorder notes on each rank what it has enqueued. We know of each rank which operation is the oldest that
has not ended: that one is its only entry, and who is late has none of it.
"""

from collections.abc import Collection
from typing import Any

from jitckpt.decisions.hang import Diagnosis, Waiting

VERSION = "2.10"  # of the format
NANOSECONDS = 10**9
# What c10d calls NCCL's operations.
OPERATIONS = {
    "ncclAllReduce": "all_reduce",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclAllGather": "_all_gather_base",
    "ncclReduceScatter": "_reduce_scatter_base",
    "ncclAlltoAll": "all_to_all",
    "ncclGather": "gather",
    "ncclScatter": "scatter",
}

Dump = dict[str, Any]


def dumps(diagnosis: Diagnosis, ranks: Collection[int], now: float) -> dict[int, Dump]:
    """Return what each rank's recorder would have written at wall time `now`.

    Sends and receives are left out: whose they are with is not in a diagnosis. The format has no room for
    that and the tool takes them for mismatches.
    """
    waits = [wait for wait in diagnosis.waits if wait.operation in OPERATIONS]
    members: dict[str, set[int]] = {}
    names = {wait.communicator: wait.dimension for wait in waits}
    arrived: dict[tuple[str, int], set[int]] = {}  # at an operation that somebody waits in
    longest: dict[tuple[str, int], Waiting] = {}
    for wait in sorted(waits, key=lambda wait: wait.seconds):
        members.setdefault(wait.communicator, {wait.rank}).update(wait.ranks, wait.late)
        operation = (wait.communicator, wait.sequence)
        longest[operation] = wait
        arrived.setdefault(operation, {wait.rank}).update(set(wait.ranks) - set(wait.late))
    return {
        rank: {
            "version": VERSION,
            "pg_config": {
                one: {"name": one, "desc": names[one] or "undefined", "ranks": str(sorted(those))}
                for one, those in members.items()
                if rank in those
            },
            "pg_status": {},
            "entries": [
                _entry(number, longest[operation], now)
                for number, operation in enumerate(one for one in sorted(arrived) if rank in arrived[one])
            ],
        }
        for rank in sorted({*ranks, *(one for those in members.values() for one in those)})
    }


def _entry(number: int, wait: Waiting, now: float) -> Dump:
    begun = int((now - wait.seconds) * NANOSECONDS)
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (wait.communicator, wait.dimension or "undefined"),
        "collective_seq_id": wait.sequence,
        "p2p_seq_id": 0,
        "op_id": wait.sequence,
        "profiling_name": f"nccl:{OPERATIONS[wait.operation]}",
        "time_created_ns": begun,
        "input_sizes": [[wait.bytes]],  # of bytes: more is not known of the elements
        "input_dtypes": ["Byte"],
        "output_sizes": [[wait.bytes]],
        "output_dtypes": ["Byte"],
        "state": "started",
        "time_discovered_started_ns": begun,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [],
    }
