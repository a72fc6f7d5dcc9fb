"""Hosts that stand by to take the place of one whose devices are broken say so where the hosts meet.

Signed with the job's secret, and only where there is one: what is sent to a host that stands by are whole
processes, and what comes to it is run there.
"""

from dataclasses import dataclass
from typing import Any

from jitckpt.hosts.coordination import Coordination
from jitckpt.hosts.signed import ForeignError, Signature

MOST = 1000  # entries that are looked at


@dataclass(frozen=True)
class Standby:
    """Where one waits to be told. unpacks: whether it has zstd."""

    address: str
    port: int
    unpacks: bool = False


def _key(job: str) -> str:
    return f"jitckpt/{job}/standby"


def announce(store: Any, signature: Signature, own: Standby) -> int:
    """Say where this host waits, and return the entry's number. Raises RuntimeError, as torch does, if the
    store is lost."""
    number: int = store.add(_key(signature.job), 1)
    signature.put(store, f"{_key(signature.job)}/{number}", [own.address, own.port, own.unpacks])
    return number


def withdraw(store: Any, signature: Signature, number: int) -> None:
    """Say that this host does not wait any more. Raises as `announce`."""
    signature.put(store, f"{_key(signature.job)}/{number}", [])


def announced(store: Any, signature: Signature) -> list[Standby]:
    """Return who has said that it waits, the newest first; it may have ended since."""
    if signature.secret is None:
        return []
    found = []
    for number in range(min(store.add(_key(signature.job), 0), MOST), 0, -1):
        try:
            match signature.take(store, f"{_key(signature.job)}/{number}"):
                case [str(address), int(port), bool(unpacks)]:
                    found.append(Standby(address, port, unpacks))
        except (ForeignError, ValueError):
            continue  # somebody else has written there
    return found


def announcement(signature: Signature, own: Standby) -> dict[str, bytes | None]:
    """Return what is to be put at a coordination service, so that others know where this host waits."""
    key = f"{_key(signature.job)}/{own.address} {own.port}"
    return {key: signature.write(key, [own.address, own.port, own.unpacks]).encode()}


def announced_at(service: Coordination, signature: Signature) -> list[Standby]:
    """Return who stands by, the newest first; it may have ended since. Raises CoordinationError."""
    if signature.secret is None:
        return []
    entries = service.get(f"{_key(signature.job)}/").entries
    found = []
    for key, entry in sorted(entries.items(), key=lambda one: one[1].revision, reverse=True):
        try:
            match signature.read(key, entry.value):
                case [str(address), int(port), bool(unpacks)]:
                    found.append(Standby(address, port, unpacks))
        except ForeignError:
            continue  # somebody else has written there
    return found
