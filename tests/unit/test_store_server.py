"""Stores listen at the one address that is needed."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from jitckpt.hosts import store_server
from jitckpt.hosts.store_server import address_for, store_at, torchs_store


def listens_at(port: int) -> set[str]:
    """Return the addresses of this machine, in /proc's words, at which somebody listens on the port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                place, state = line.split()[1], line.split()[3]
                if state == "0A" and int(place.rpartition(":")[2], 16) == port:
                    found.add(place.rpartition(":")[0])
    return found


def test_a_store_listens_at_its_address_alone() -> None:
    store = store_at("127.0.0.1")
    assert listens_at(store.port) == {"0100007F"}
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    client.set("a", "b")
    assert store.get("a") == b"b"


def test_what_torch_makes_for_itself_does_so_too() -> None:
    as_static = torchs_store("127.0.0.1", "127.0.0.1", 0, 1, True, multi_tenant=True)
    as_c10d = torchs_store("127.0.0.1", "127.0.0.1", 0, is_master=True, multi_tenant=True)
    for store in (as_static, as_c10d):
        assert listens_at(store.port) == {"0100007F"}
    client = torchs_store("127.0.0.1", "127.0.0.1", as_c10d.port, is_master=False, wait_for_workers=False)
    client.set("a", "b")
    everywhere = torchs_store(None, "127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listens_at(everywhere.port) != {"0100007F"}


def test_a_port_that_is_taken_is_an_error_that_torch_knows() -> None:
    store = store_at("127.0.0.1")
    with pytest.raises(RuntimeError, match=r"no store can listen at 127.0.0.1, port \d+: .*in use"):
        store_at("127.0.0.1", store.port)


@pytest.mark.parametrize(
    ("addresses", "own", "alone", "found"),
    [
        (["10.0.0.1"], ["10.0.0.1"], False, "10.0.0.1"),
        (["127.0.1.1"], ["127.0.1.1"], False, None),  # as Debian calls its own name
        (["127.0.1.1"], ["127.0.1.1"], True, "127.0.1.1"),
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"], False, None),
        (["10.0.0.9"], [], False, None),  # it is known by another's address
        (["10.0.0.9"], [], True, None),
        ([], [], False, None),
    ],
)
def test_where_others_may_come_by_another_address_it_listens_everywhere(
    addresses: Sequence[str],
    own: Sequence[str],
    alone: bool,
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolved(*_: Any, **__: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(store_server, "_is_own", own.__contains__)
    assert address_for("name", alone) == found
