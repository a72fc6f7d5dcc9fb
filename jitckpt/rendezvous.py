"""What the agents of a job on several hosts tell each other when they meet, and which address is whose."""

import contextlib
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from torch.distributed.launcher.api import LaunchConfig

from jitckpt.errors import HostsError, JitckptError
from jitckpt.hosts import Host
from jitckpt.layout import parse_object
from jitckpt.quorum import Past

DEFAULT_PORT = 29400  # as torch has it
DEFAULT_TIMEOUT = 600.0
ANSWER_SECONDS = 3.0


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


def exchange(
    store: Store, prefix: str, place: tuple[int, int], own: Host, secret: bytes | None
) -> tuple[list[Host], bytes]:
    """Tell all hosts of a rendezvous of each other through its store; return them, and the job's secret.

    prefix: of the keys, which are new for every exchange. place: the number of this host, and of how many.
    Without a secret of one's own the host 0 makes one, which is as safe as the store. Raises
    torch.distributed.DistError if a host or the store has died in the meantime, HostsError if one says
    nonsense.
    """
    index, count = place
    store.set(f"{prefix}/host/{index}", json.dumps(asdict(own)))
    if secret is None:
        if index == 0:
            store.set(f"{prefix}/secret", secrets.token_hex())
        secret = store.get(f"{prefix}/secret")
    return [_told_by(i, store.get(f"{prefix}/host/{i}")) for i in range(count)], secret


def agree(store: Store, prefix: str, place: tuple[int, int]) -> None:
    """Wait until all hosts of an exchange know the same and go on. Raises DistError if one does not."""
    index, count = place
    store.set(f"{prefix}/agreed/{index}", "yes")
    for other in range(count):
        store.get(f"{prefix}/agreed/{other}")


def _told_by(number: int, text: bytes) -> Host:
    try:
        return _host(parse_object(text, f"Host {number}"))
    except (JitckptError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise HostsError(
            f"What host {number} tells of itself makes no sense ({error!r:.200}). All hosts need the same "
            "version of jitckpt."
        ) from error


def _host(told: Mapping[str, Any]) -> Host:
    return Host(
        str(told["address"]),
        int(told["port"]),
        tuple(map(int, told["ranks"])),
        int(told["restarts"]),
        str(told["directory"]),
        int(told["worker_store"]),
        int(told["reserve"]),
        bool(told["has_store"]),
        tuple(map(past_of, told["pasts"])),
        str(told["agent"]),
    )


def past_of(told: Mapping[str, Any]) -> Past:
    """Return what was told as JSON."""
    return Past(
        str(told["start"]),
        int(told["number"]),
        int(told["hosts"]),
        int(told["place"]),
        int(told["holder"]),
        tuple(map(int, told["ended"])),
        tuple(map(str, told["in_doubt"])),
    )


def places(wishes: Sequence[int | None]) -> list[int]:
    """Return the place of each host, as it wishes; None: whichever is free. HostsError for two alike."""
    wished = [wish for wish in wishes if wish is not None]
    if twice := sorted({wish for wish in wished if wished.count(wish) > 1}):
        raise HostsError(
            f"{wished.count(twice[0])} hosts were started with --node-rank {twice[0]}; every host needs its "
            "own."
        )
    free = iter(sorted(set(range(len(wishes))) - set(wished)))
    return [next(free) if wish is None else wish for wish in wishes]


def join_timeout(config: LaunchConfig) -> float:
    """Return how many seconds a rendezvous may take."""
    return float(config.rdzv_configs.get("join_timeout", DEFAULT_TIMEOUT))


def answers(host: str, port: int) -> bool:
    """Return whether somebody listens there."""
    try:
        socket.create_connection((host, port), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def own_address(towards: str) -> str:
    """Return the address under which this host reaches `towards`, a name or an address. Raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as unconnected:
        unconnected.connect(place)  # sends nothing
        return str(unconnected.getsockname()[0])


def is_own_address(name: str) -> bool:
    """Return whether this host has the address, or one of that name."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(place)
            return True
    return False
