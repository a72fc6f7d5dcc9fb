"""Which device of a host each of its ranks has, which are broken for good, and which are free.

A device is broken for good if a rank fails on it, gets a new server, and fails on it again before it comes to
a newer state: what a new server could cure is cured by then.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

# What CUDA gives where the device itself is at fault, and not what a program has done with it: initialization
# error, devices unavailable, no device, invalid device, ECC, NVLink, contained, unknown.
ERRORS_OF_DEVICES = frozenset({3, 46, 100, 101, 214, 220, 721, 999})
UNHANDLED_CUDA_ERROR = 1  # of NCCL's: the device's own error, at a collective
_NUMBER = re.compile(r"\b(CUDA|NCCL) error (\d+)\b")
# It can't even open the device, or has given up with it; one that was killed is another matter.
_NO_SERVER = re.compile(r"\bserver .*(before it was ready|ended with status \d+)")


def is_of_the_device(error: str) -> bool:
    """Return whether a rank's error may be its device's own, such that another one would not have it."""
    found = _NUMBER.search(error)
    if found is None:
        return _NO_SERVER.search(error) is not None
    library, number = found[1], int(found[2])
    return number in ERRORS_OF_DEVICES if library == "CUDA" else number == UNHANDLED_CUDA_ERROR


@dataclass(frozen=True)
class Devices:
    """Of one host. names: of all that it may use, as in CUDA_VISIBLE_DEVICES. of: by rank.

    failed: by rank the state from which it could not come on. broken: those that no new server cures.
    """

    names: tuple[str, ...]
    of: Mapping[int, str]
    failed: Mapping[int, int] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()

    @classmethod
    def of_ranks(cls, names: Sequence[str], ranks: Sequence[int]) -> "Devices":
        """Return those of a host's ranks at their start, which have one each."""
        return cls(tuple(names), dict(zip(ranks, names, strict=False)))

    @property
    def free(self) -> tuple[str, ...]:
        """Those that no rank has and that are not broken."""
        return tuple(name for name in self.names if name not in self.broken and name not in self.of.values())

    def stopped(self, rank: int, state: int, error: str) -> "Devices":
        """Take note of what a rank says that has come to rest: its newest state, and why it failed, or ""."""
        if not is_of_the_device(error) or rank not in self.of:
            return self
        if self.failed.get(rank) != state:
            return replace(self, failed={**self.failed, rank: state})
        return replace(self, broken=self.broken | {self.of[rank]})

    def is_broken(self, rank: int) -> bool:
        """Return whether the device that the rank has is broken."""
        return self.of.get(rank) in self.broken

    def exchanged(self, rank: int) -> "Devices | None":
        """Return the same with another device for the rank; None if none is free."""
        if not self.free:
            return None
        failed = {other: state for other, state in self.failed.items() if other != rank}
        return replace(self, of={**self.of, rank: self.free[0]}, failed=failed)

    def visible(self, first: str, now: str, listed: str | None) -> str:
        """Return CUDA_VISIBLE_DEVICES of a server whose rank had `first` and has `now`.

        listed: the same of its program, None where that sees all. The numbers by which the program calls its
        devices stay: the two change places.
        """
        names = self.names if listed is None else [name.strip() for name in listed.split(",")]
        other = {first: now, now: first}
        return ",".join(other.get(name, name) for name in names)
