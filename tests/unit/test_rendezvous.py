"""How hosts find each other."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.launcher.api import LaunchConfig

from jitckpt import rendezvous
from jitckpt.errors import HostsError
from jitckpt.hosts import Host


class Store:
    """A store for hosts that come one after the other."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def test_hosts_learn_of_each_other_and_of_the_secret_through_the_store() -> None:
    store, own = Store(), Host("10.0.0.1", 7000, (0, 1), 2)
    alone, secret = rendezvous.exchange(store, "first", (0, 1), own, None)
    assert alone == [own]
    assert len(secret) == 64
    other = replace(own, address="10.0.0.2", ranks=(2, 3))
    assert rendezvous.exchange(store, "first", (1, 2), other, None) == ([own, other], secret)
    assert rendezvous.exchange(store, "first", (1, 2), other, b"our own") == ([own, other], b"our own")
    assert b"our own" not in store.values.values()


def test_a_host_knows_its_own_addresses() -> None:
    assert rendezvous.own_address("127.0.0.1") == "127.0.0.1"
    assert rendezvous.is_own_address("localhost")
    assert not rendezvous.is_own_address("192.0.2.1")
    assert not rendezvous.is_own_address("no.such.host.invalid")


class Handler:
    """A rendezvous handler whose store may be gone."""

    def __init__(self) -> None:
        self.heart_stopped = False

    def _stop_heartbeats(self) -> None:
        self.heart_stopped = True

    def shutdown(self) -> bool:
        raise AssertionError("the store is touched")


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which nobody else can listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def config(port: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"join_timeout": 1},
    )


def after_failure(port: int, handler: Any, store: Any) -> Any:
    return rendezvous.handler_after_failure(config(port), handler, store)


def test_the_rendezvous_is_kept_while_its_store_is_there() -> None:
    store, handler = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Handler()
    assert after_failure(store.port, handler, store) is handler
    assert not handler.heart_stopped


def test_a_store_that_does_not_come_back_ends_the_job_with_advice(free_port: int) -> None:
    handler = Handler()
    with pytest.raises(
        HostsError, match=r"No host with the address 127.0.0.1 has come in 1 s. Start the job"
    ):
        after_failure(free_port, handler, Store())
    assert handler.shutdown(), "nothing more is asked of a store that is gone"


def test_another_store_at_the_same_address_is_taken() -> None:
    """The old one's connection has ended; the handler that is given back talks to the new one."""
    old = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = old.port
    client = TCPStore("127.0.0.1", port, is_master=False)
    del old
    new = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    handler = after_failure(port, Handler(), client)
    assert handler.get_run_id() == "job"
    assert new.check(["torch.rendezvous.job"])
