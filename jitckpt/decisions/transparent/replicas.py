"""Which ranks have the same parameters and optimizer state, from digests of what each has."""

from collections.abc import Mapping


def shards(digests: Mapping[int, str]) -> dict[int, int]:
    """Return a number for each rank, the same for those that have the same: that of the first."""
    first: dict[str, int] = {}
    return {rank: first.setdefault(digest, rank) for rank, digest in sorted(digests.items())}


def groups(shards: Mapping[int, int]) -> list[list[int]]:
    """Return the ranks of each shard."""
    return [[rank for rank in shards if shards[rank] == shard] for shard in sorted(set(shards.values()))]


def alone(shards: Mapping[int, int]) -> list[int]:
    """Return the ranks whose state no other rank has."""
    return [ranks[0] for ranks in groups(shards) if len(ranks) == 1]
