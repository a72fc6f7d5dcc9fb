"""Hosts that stand by to take the place of one whose devices are broken say so in the rendezvous' store."""

from dataclasses import dataclass
from typing import Any

from jitckpt.hosts.signed import ForeignError, Signature

MOST = 1000  # entries that are looked at


@dataclass(frozen=True)
class Standby:
    """Where one waits to be told. secret: for its link, where the hosts were given none."""

    address: str
    port: int
    secret: bytes


def _key(job: str) -> str:
    return f"jitckpt/{job}/standby"


def announce(store: Any, signature: Signature, own: Standby) -> None:
    """Say where this host waits. Raises RuntimeError, as torch does, if the store is lost."""
    number = store.add(_key(signature.job), 1)
    secret = "" if signature.secret is not None else own.secret.hex()
    signature.put(store, f"{_key(signature.job)}/{number}", [own.address, own.port, secret])


def announced(store: Any, signature: Signature) -> list[Standby]:
    """Return who has said that it waits, the newest first; it may have ended since."""
    found = []
    for number in range(min(store.add(_key(signature.job), 0), MOST), 0, -1):
        try:
            match signature.take(store, f"{_key(signature.job)}/{number}"):
                case [str(address), int(port), str(secret)]:
                    own = signature.secret if signature.secret is not None else bytes.fromhex(secret)
                    found.append(Standby(address, port, own))
        except (ForeignError, ValueError):
            continue  # somebody else has written there
    return found
