"""Which snapshots of their processes all hosts of a job have, so that it can go back to one. Pure."""

from collections.abc import Sequence

# A snapshot's step, and the name that all hosts have for it: another run may have one after the same step.
Named = tuple[int, str]


def common(hosts: Sequence[Sequence[Named]]) -> list[Named]:
    """Return what all hosts have, the oldest first; hosts: of each those that are whole there."""
    if not hosts:
        return []
    return sorted(set(hosts[0]).intersection(*hosts[1:]))
