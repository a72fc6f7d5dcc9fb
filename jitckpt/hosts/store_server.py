"""Stores that listen where they are needed, and not, as torch's do, at every address of the machine."""

import errno
import ipaddress
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from jitckpt.hosts.connections import listen
from jitckpt.hosts.rendezvous import answers

LOOK_SECONDS = 0.1  # between two looks for a store


def store_at(address: str, port: int = 0, **torchs: Any) -> Any:
    """Return a new store that listens at one address; port 0: any that is free. torchs: other arguments.

    Raises DistNetworkError, as torch does, if there can be none.
    """
    try:
        listener = listen(address, port)
    except OSError as error:
        raise DistNetworkError(f"no store can listen at {address}, port {port}: {error}") from error
    port = listener.getsockname()[1]
    return TCPStore(  # which closes the listener
        address,
        port,
        is_master=True,
        master_listen_fd=listener.detach(),
        **{"wait_for_workers": False, **torchs},
    )


def torchs_store(
    address: str | None, host: str, port: int, world_size: int | None = None, *rest: Any, **named: Any
) -> Any:
    """Return what torch makes itself, in the place of its class; a new store listens at `address`.

    address: None for all of the machine's.
    """
    names = ("is_master", "timeout", "wait_for_workers", "multi_tenant")
    named |= dict(zip(names, rest, strict=False))
    if not named.get("is_master"):
        _wait_for(host, port, named.get("timeout", default_pg_timeout))
    if address is None or not named.get("is_master"):
        return TCPStore(host, port, world_size, **named)
    del named["is_master"]
    named.pop("multi_tenant", None)  # it has this process and port to itself
    return store_at(address, port, world_size=world_size, **named)


def _wait_for(host: str, port: int, timeout: timedelta) -> None:
    """Wait until somebody listens there. Torch itself would wait, too, but it hears no signal meanwhile.

    Raises DistNetworkError after so long.
    """
    until = time.monotonic() + timeout.total_seconds()
    while not answers(host, port):
        if time.monotonic() >= until:
            raise DistNetworkError(f"nobody has listened at {host}, port {port} for {timeout}")
        time.sleep(LOOK_SECONDS)


def address_for(host: str, alone: bool) -> str | None:
    """Return where the store of a job that is called `host` is to listen; None for everywhere.

    alone: no other host comes there. Else, if the name means a loopback address here, or several, or none of
    this machine's, nobody can tell by which the others come.
    """
    try:
        found = [place[0] for *_, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    own = [address for address in dict.fromkeys(map(str, found)) if _is_own(address)]
    if alone:
        return own[0] if own else None
    (only,) = own if len(own) == 1 else (None,)
    return None if only is None or ipaddress.ip_address(only.partition("%")[0]).is_loopback else only


def _is_own(address: str) -> bool:
    try:
        listen(address).close()
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
