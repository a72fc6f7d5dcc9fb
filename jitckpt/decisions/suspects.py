"""Devices that are suspect, and how a restart does without them. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jitckpt.errors import JitckptError

VARIABLE = "CUDA_VISIBLE_DEVICES"
FAILURES_TO_BE_SUSPECT = 2


class NoDeviceError(JitckptError):
    """There are not enough devices without the suspect ones; the text is a sentence."""


@dataclass
class Suspects:
    """How often which rank failed on which device of this host, named as in CUDA_VISIBLE_DEVICES."""

    failures: Counter[tuple[int, str]] = field(default_factory=Counter)

    def note(self, rank: int, device: str) -> bool:
        """Take note of a failure; return whether it has made the device suspect."""
        self.failures[rank, device] += 1
        return self.failures[rank, device] == FAILURES_TO_BE_SUSPECT

    @property
    def devices(self) -> frozenset[str]:
        """Those on which one rank has failed twice."""
        return frozenset(
            device for (_, device), count in self.failures.items() if count >= FAILURES_TO_BE_SUSPECT
        )


def visible_devices(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the names of the devices that a program with this environment sees, in order.

    count: how many it sees without CUDA_VISIBLE_DEVICES.
    """
    listed = environment.get(VARIABLE)
    if listed is None:
        return tuple(str(number) for number in range(count))
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def without(devices: Sequence[str], suspect: Iterable[str], ranks: int) -> list[str]:
    """Return the devices so that none of the first `ranks`, one for each rank of the host, is suspect.

    Ranks whose device is not suspect keep theirs. Raises NoDeviceError if too few are left.
    """
    suspect = set(suspect)
    free = [device for device in devices[ranks:] if device not in suspect]
    lost = suspect.intersection(devices[:ranks])
    if len(lost) > len(free):
        raise NoDeviceError(
            f"{ranks} ranks need a device each, device {' and '.join(sorted(lost))} is suspect, and "
            f"{len(free)} other{'s are' if len(free) != 1 else ' is'} free"
        )
    return [free.pop(0) if device in suspect else device for device in devices[:ranks]] + free
