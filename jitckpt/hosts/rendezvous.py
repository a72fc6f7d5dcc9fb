"""What the agents of a job on several hosts tell each other when they meet, and which address is whose."""

import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError
from torch.distributed.launcher.api import LaunchConfig

from jitckpt.console import say
from jitckpt.errors import HostsError
from jitckpt.hosts.signed import ForeignError, Signature, Store
from jitckpt.wire.checked import ProtocolError, part_of
from jitckpt.wire.hosts import Host

DEFAULT_PORT = 29400  # as torch has it
DEFAULT_TIMEOUT = 600.0
ANSWER_SECONDS = 3.0
NAME_SECONDS = 1.0  # between two looks for a name
SAME = "All hosts need the same --secret-file, or none, and the same version of jitckpt."


def exchange(
    store: Store, prefix: str, place: tuple[int, int], own: Host, signature: Signature
) -> tuple[list[Host], bytes]:
    """Tell all hosts of a rendezvous of each other through its store; return them, and the job's secret.

    prefix: of the keys, which are new for every exchange. place: the number of this host, and of how many.
    Where the hosts were given no secret the host 0 makes one, which is as safe as the store. Raises
    torch.distributed.DistError if a host or the store has died in the meantime, HostsError if one says
    nonsense.
    """
    index, count = place
    signature.put(store, f"{prefix}/host/{index}", asdict(own))
    if signature.secret is None and index == 0:
        store.set(f"{prefix}/secret", secrets.token_hex())
    hosts = [_told_by(number, store, f"{prefix}/host/{number}", signature) for number in range(count)]
    _check_ranks(hosts)
    return hosts, signature.secret or store.get(f"{prefix}/secret")


def decline(store: Store, prefix: str, index: int, signature: Signature) -> None:
    """Tell those that wait in an exchange for this host that it does not come."""
    signature.put(store, f"{prefix}/host/{index}", None)


def agree(store: Store, prefix: str, place: tuple[int, int], start: str, signature: Signature) -> None:
    """Wait until all hosts of an exchange know the same start, and go on.

    Raises DistError if one does not, HostsError if one, or somebody in its place, says something else.
    """
    index, count = place
    signature.put(store, f"{prefix}/agreed/{index}", start)
    for other in range(count):
        try:
            told = signature.take(store, f"{prefix}/agreed/{other}")
        except ForeignError as error:
            raise HostsError(f"What host {other} agrees to can't be read: {error}. {SAME}") from error
        if told != start:
            raise HostsError(f"Host {other} agrees to another start than this host knows of. {SAME}")


def _told_by(number: int, store: Store, key: str, signature: Signature) -> Host:
    try:
        told = signature.take(store, key)
        if told is None:
            raise DistError(f"host {number} has no part in this start")
        return part_of(Host, told, "host")
    except (ForeignError, ProtocolError) as error:
        raise HostsError(
            f"What host {number} tells of itself makes no sense ({error!r:.200}). {SAME}"
        ) from error


def _check_ranks(hosts: Sequence[Host]) -> None:
    """See that each rank is on one host."""
    ranks = sorted(rank for host in hosts for rank in host.ranks)
    if ranks != list(range(len(ranks))):
        raise HostsError(
            f"The hosts say that they have the ranks {ranks!r:.200}, of which some are missing or double."
        )


def places(wishes: Sequence[int | None], most: int = 0) -> list[int]:
    """Return the place of each host, as it wishes; None: whichever is free. HostsError for two alike.

    most: so many there are when none is missing; of fewer each keeps its turn.
    """
    if len(wishes) < most and all(wish is None or type(wish) is int for wish in wishes):
        known = sorted({wish for wish in wishes if wish is not None})
        wishes = [None if wish is None else known.index(wish) for wish in wishes]
    if not all(wish is None or wish in range(len(wishes)) for wish in wishes):
        raise HostsError(f"Of {len(wishes)} hosts some say that they have the places {wishes!r:.200}.")
    wished = [wish for wish in wishes if wish is not None]
    if twice := sorted({wish for wish in wished if wished.count(wish) > 1}):
        raise HostsError(
            f"{wished.count(twice[0])} hosts were started with --node-rank {twice[0]}; every host needs its "
            "own."
        )
    free = iter(sorted(set(range(len(wishes))) - set(wished)))
    return [next(free) if wish is None else wish for wish in wishes]


def wishes_of(told: Sequence[object], most: int) -> list[Any]:
    """Return which place each host wishes: that which its user wants, else its last one, if that is free.

    told: both, of each host; None where there is none. most: so many hosts there are when none is missing.
    """
    pairs = [one if isinstance(one, list) and len(one) == 2 else [one, None] for one in told]
    wishes = [wanted for wanted, _ in pairs]
    if len(pairs) == most:
        for number, (wanted, before) in enumerate(pairs):
            if wanted is None and before in range(most) and before not in wishes:
                wishes[number] = before
    return wishes


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


def wait_for_name(*names: str, seconds: float = DEFAULT_TIMEOUT) -> None:
    """Wait until one of the names means an address; a pod's does only once the pod is there."""
    end, said = time.monotonic() + seconds, False
    while not any(map(_means_an_address, names)) and time.monotonic() < end:
        if not said:
            say(f"nobody is called {' or '.join(names)} yet; this host waits for the pod of that name.")
            said = True
        time.sleep(NAME_SECONDS)


def _means_an_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except socket.gaierror:
        return False


def own_address(*towards: str) -> str:
    """Return the address under which this host reaches the first of these names and addresses that it can.

    Raises OSError with a sentence.
    """
    why = []
    for name in towards:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as unconnected:
                unconnected.connect(place)  # sends nothing
                return str(unconnected.getsockname()[0])
        except OSError as error:
            why.append(f"there is no way from here to {name} ({error.strerror})")
    raise OSError("; ".join(why))


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
