"""How the agents of a job on several hosts find each other: by torch's rendezvous.

One of them holds its store. If that host is lost, the others wait for another that takes its address.
"""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.console import say
from jitckpt.errors import HostsError
from jitckpt.hosts import Host
from jitckpt.layout import parse_object

DEFAULT_PORT = 29400  # as torch has it
DEFAULT_TIMEOUT = 600.0
ANSWER_SECONDS = 3.0


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def exchange(
    store: Store, prefix: str, place: tuple[int, int], own: Host, secret: bytes | None
) -> tuple[list[Host], bytes]:
    """Tell all hosts of a rendezvous of each other through its store; return them, and the job's secret.

    prefix: of the keys, which are new for every exchange. place: the number of this host, and of how many.
    Without a secret of one's own the host 0 makes one, which is as safe as the store. Raises
    torch.distributed.DistError if a host or the store has died in the meantime.
    """
    index, count = place
    store.set(f"{prefix}/host/{index}", json.dumps(asdict(own)))
    if secret is None:
        if index == 0:
            store.set(f"{prefix}/secret", secrets.token_hex())
        secret = store.get(f"{prefix}/secret")
    return [_host(parse_object(store.get(f"{prefix}/host/{i}"), f"Host {i}")) for i in range(count)], secret


def _host(told: Mapping[str, Any]) -> Host:
    return Host(
        str(told["address"]),
        int(told["port"]),
        tuple(map(int, told["ranks"])),
        int(told["restarts"]),
        str(told["directory"]),
        int(told["worker_store"]),
    )


def handler_after_failure(
    config: LaunchConfig, handler: RendezvousHandler, store: Store
) -> RendezvousHandler:
    """Return the handler to go on with: `handler` if its store is still there, else one with a new store.

    Waits for one as long as for hosts that join; raises HostsError if none comes.
    """
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT)
    if answers(host, port) and _is_alive(store):
        return handler
    # Its heartbeats may hang in a connection to nobody: nobody waits for them.
    threading.Thread(target=handler._stop_heartbeats, daemon=True).start()  # type: ignore[attr-defined]
    handler.shutdown = lambda: True  # type: ignore[method-assign]
    timeout = join_timeout(config)
    say(
        f"the host that held the rendezvous' store at {config.rdzv_endpoint} is gone. Start the same command "
        f"on it, or on another that takes its address; this host waits for it, for at most {timeout:g} s."
    )
    deadline = time.monotonic() + timeout
    while not answers(host, port):
        if time.monotonic() > deadline:
            raise HostsError(
                f"No host with the address {host} has come in {timeout:g} s. Start the job on all hosts "
                "again, with an --rdzv-endpoint that is one of them; it goes on from its newest save."
            )
        time.sleep(1)
    return rendezvous_handler_registry.create_handler(_of_client(config))


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


def _is_alive(store: Store) -> bool:
    """Return whether it is the same store: another on the same port does not know this connection."""
    try:
        store.check(["jitckpt"])
    except RuntimeError:  # DistError is one
        return False
    return True


def _of_client(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **(config.rdzv_configs | {"is_host": False}),
    )


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
