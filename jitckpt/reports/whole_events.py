"""What an event has to have to be understood: a log may be damaged, or of another version."""

from jitckpt.events import Event

MOST_RANKS = 1 << 20

# What an event has to have to be understood here; several processes write the log, of several versions.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "job_started": {"world_size": int, "max_restarts": int},
    "restart": {"world_size": int, "max_restarts": int},
    "registered": {"rank": int, "shard": int, "shards": int, "checkpoint_dir": str, "fingerprint": str},
    "proxy_connected": {"rank": int},
    "restored": {"rank": int, "step": int},
    "first_step": {"rank": int, "step": int},
    "fault": {"fault": str, "rank": int},
    "hang": {"operation": str, "seconds": (int, float)},
    "straggler": {"ranks": list},
    "detected": {"cause": str, "text": str, "first": bool},
    "device_alarm": {"rank": int, "text": str},
    "save_ordered": {"ranks": list},
    "save_begun": {"rank": int, "step": int},
    "save_ended": {"rank": int, "step": int, "shard": int, "bytes": int},
    "periodic_save": {"rank": int, "step": int, "shard": int},
    "saved": {"step": int},
    "memory_safe": {"step": int, "bytes": int},
    "memory_placement": {"hosts": list},
    "memory_method": {"method": str, "text": str},
    "memory_state": {"state": str, "ranks": list, "step": (int, type(None))},
    "kept_in_memory": {"step": int, "newest": (int, type(None))},
    "not_saved": {"step": (int, type(None)), "text": str},
    "memory_sources": {"reason": str},
    "ranks_ended": {"kill": list, "terminate": list},
    "rank_stopped": {"rank": int, "seconds": (int, float)},
    "recovery_begun": {"recovery": int},
    "server_restarted": {"rank": int},
    "calls_made_again": {"rank": int},
    "worker_moved": {"rank": int, "dump": (int, float), "restore": (int, float)},
    "ranks_moved": {
        "host": int,
        "ranks": list,
        "bytes": int,
        "dump": (int, float),
        "transfer": (int, float),
        "restore": (int, float),
    },
    "snapshot": {"step": int, "bytes": int},
    "snapshot_pause": {
        "step": int,
        "stop": (int, float),
        "dump": (int, float),
        "device": (int, float),
        "seconds": (int, float),
    },
    "gone_back": {"step": int, "seconds": (int, float)},
    "device_exchanged": {"rank": int, "device": str, "broken": str},
    "recovered": {"state": int},
    "recovery_given_up": {"text": str},
    "state_stays": {"replicas": list},
    "group": {"name": str, "ranks": list},
    "suspect": {"rank": int, "device": str, "host": str},
    "hang_report": {"path": str},
    "warning": {"text": str},
    "incurable": {"text": str},
    "switched_off": {"text": str},
    "finished": {"rank": int, "step": int},
    "job_ended": {"outcome": str},
}
_NUMBERS = ("ranks", "kill", "terminate")  # lists of ranks, whatever has them


def is_whole(event: Event) -> bool:
    """Return whether an event has what its name promises: a log may be damaged, or of another version."""
    fields = _FIELDS.get(event["event"], {})
    if not all(isinstance(event.get(name), kind) for name, kind in fields.items()):
        return False
    if not all(map(_are_numbers, [event.get(name, ()) for name in _NUMBERS] + event.get("replicas", []))):
        return False
    if not all(isinstance(event.get(name, 0), int) for name in ("log_bytes", "image_bytes")):
        return False
    rank, ranks = event.get("rank"), event.get("world_size", 0)
    return (rank is None or isinstance(rank, int)) and isinstance(ranks, int) and 0 <= ranks <= MOST_RANKS


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)
