"""Which snapshots of their processes all hosts of a job have, so that it can go back to one. Pure."""

from collections.abc import Sequence

# A snapshot's step, and the name that all hosts have for it: another run may have one after the same step.
Named = tuple[int, str]


def common(hosts: Sequence[Sequence[Named]]) -> list[Named]:
    """Return what all hosts have, the oldest first; hosts: of each those that are whole there."""
    if not hosts:
        return []
    return sorted(set(hosts[0]).intersection(*hosts[1:]))


def of_other_place(folders: Sequence[int], place: int) -> int | None:
    """Return the place of a host whose snapshots lie here, where this host has another and has none.

    folders: the places of hosts that have some here.
    """
    return min(folders, default=None) if place not in folders else None
