"""Hosts that stand by to take the place of one whose devices are broken say so in the rendezvous' store.

Signed with the job's secret, and only where there is one: what is sent to a host that stands by are whole
processes, and what comes to it is run there.
"""

from dataclasses import dataclass
from typing import Any

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


def announce(store: Any, signature: Signature, own: Standby) -> None:
    """Say where this host waits. Raises RuntimeError, as torch does, if the store is lost."""
    number = store.add(_key(signature.job), 1)
    signature.put(store, f"{_key(signature.job)}/{number}", [own.address, own.port, own.unpacks])


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
