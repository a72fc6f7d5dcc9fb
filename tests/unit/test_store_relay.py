"""The relay between torch's TCPStore clients and their store: every request, and clients that are moved."""

import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jitckpt.agent.migration.store_relay import StoreError, StoreRelay
from jitckpt.decisions import store_requests
from jitckpt.decisions.store_requests import Conversation, UnknownRequestError, keys_written, request_end
from jitckpt.device import LIBRARY_DIR, STORE_LIBRARY
from jitckpt.hosts.store_server import store_at


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def text(value: bytes) -> bytes:
    return number(len(value)) + value


VALIDATE = bytes([store_requests.VALIDATE]) + 0x3C85F7CE.to_bytes(4, "little")
SET = bytes([store_requests.SET]) + text(b"key") + text(b"value")
WAIT = bytes([store_requests.WAIT]) + number(2) + text(b"one") + text(b"other")
ADD = bytes([store_requests.ADD]) + text(b"count") + number(1)
REQUESTS = [
    VALIDATE,
    SET,
    WAIT,
    ADD,
    bytes([store_requests.COMPARE_SET]) + text(b"key") + text(b"") + text(b"new"),
    bytes([store_requests.GET]) + text(b"key"),
    bytes([store_requests.CHECK]) + number(1) + text(b"key"),
    bytes([store_requests.NUMBER_OF_KEYS]),
    bytes([store_requests.DELETE_KEY]) + text(b"key"),
    bytes([store_requests.APPEND]) + text(b"key") + text(b"more"),
    bytes([store_requests.MULTI_GET]) + number(2) + text(b"one") + text(b"other"),
    bytes([store_requests.MULTI_SET]) + number(1) + text(b"key") + text(b"value"),
    bytes([store_requests.CANCEL_WAIT]),
    bytes([store_requests.PING]) + bytes(4),
    bytes([store_requests.QUEUE_PUSH]) + text(b"queue") + text(b"value"),
    bytes([store_requests.QUEUE_POP]) + text(b"queue"),
    bytes([store_requests.QUEUE_LENGTH]) + text(b"queue"),
    bytes([store_requests.LIST_KEYS]),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda whole: str(whole[0]))
def test_a_request_ends_where_it_does_and_not_before(request_: bytes) -> None:
    assert request_end(request_ + b"\1more") == len(request_)
    assert [request_end(request_[:size]) for size in range(len(request_))] == [None] * len(request_)


def test_the_keys_that_a_request_may_change_are_known() -> None:
    reads = [WAIT[0], VALIDATE[0], store_requests.GET, store_requests.CHECK, store_requests.MULTI_GET]
    reads += [store_requests.NUMBER_OF_KEYS, store_requests.CANCEL_WAIT, store_requests.PING]
    reads += [store_requests.QUEUE_LENGTH, store_requests.LIST_KEYS]
    for whole in REQUESTS:
        found = keys_written(whole)
        if whole[0] in reads:
            assert found == []
        else:
            assert found == [b"count" if whole == ADD else b"queue" if b"queue" in whole else b"key"]
    several = bytes([store_requests.MULTI_SET]) + number(2)
    several += text(b"one") + text(b"1") + text(b"other") + text(b"2")
    assert keys_written(several) == [b"one", b"other"]


def test_all_kinds_of_requests_are_known_and_no_other() -> None:
    assert {one[0] for one in REQUESTS} == set(range(18))
    with pytest.raises(UnknownRequestError):
        request_end(bytes([18]))


def test_only_a_wait_is_said_again_and_what_has_not_come_whole() -> None:
    said = Conversation()
    said.asked(VALIDATE + SET + WAIT)
    assert said.again() == VALIDATE + WAIT
    said.answered()
    said.asked(ADD[:5])
    assert said.again() == VALIDATE + ADD[:5]
    assert said.obstacle() == ""
    said.asked(ADD[5:])
    assert said.obstacle() == "the job's store has not answered it"
    said.answered()
    assert (said.again(), said.obstacle()) == (VALIDATE, "")


def test_who_says_something_unknown_can_not_be_moved() -> None:
    said = Conversation()
    said.asked(VALIDATE + b"\xff" + WAIT)
    assert said.obstacle() == "it asks the job's store something unknown (request 255)"


@pytest.fixture
def store() -> Any:
    return store_at("127.0.0.1")


@pytest.fixture
def relay(store: Any) -> Iterator[StoreRelay]:
    made = StoreRelay("127.0.0.1", store.port)
    yield made
    made.close()


def client(relay: StoreRelay, script: str) -> "subprocess.Popen[str]":
    """Start a program whose connections to the store become those to the relay. `store` makes one."""
    address = relay.variables["JITCKPT_STORE_ADDRESSES"]
    head = [
        "import sys, threading",
        "from datetime import timedelta",
        "from time import sleep",
        "from torch.distributed import DistStoreError, TCPStore",
        f"host, _, port = {address!r}.rpartition(':')",
        "SECONDS = timedelta(seconds=60)",
        "def store():",
        "    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=SECONDS)",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join([*head, textwrap.dedent(script)])],
        env={**os.environ, **relay.variables, "LD_PRELOAD": str(LIBRARY_DIR / STORE_LIBRARY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def moved(relay: StoreRelay, store: Any) -> StoreRelay:
    """Have another relay take all clients over."""
    ends = list(relay.sockets.values())
    relay.rest(ends)
    other = StoreRelay("127.0.0.1", store.port)
    copies = [one.dup() for one in ends]
    for end, said in zip(copies, relay.conversations(ends), strict=True):
        other.take_over(end, said)
    other.go_on(copies)
    return other


def test_torchs_own_client_does_all_that_it_can(relay: StoreRelay) -> None:
    program = client(
        relay,
        """
        one = store()
        one.set("key", "value")
        assert one.get("key") == b"value"
        assert one.add("count", 5) == 5
        assert one.check(["key"])
        assert not one.check(["other"])
        assert one.compare_set("key", "value", "new") == b"new"
        one.append("key", "er")
        one.multi_set(["a", "b"], ["x" * 3_000_000, "2"])
        assert [len(found) for found in one.multi_get(["a", "b"])] == [3_000_000, 1]
        assert one.num_keys() >= 4
        assert one.delete_key("b")
        one.queue_push("queue", "first")
        assert one.queue_len("queue") == 1
        assert one.queue_pop("queue") == b"first"
        assert {"key", "a"} <= set(one.list_keys())
        try:
            one.wait(["never"], timedelta(seconds=0.2))
        except DistStoreError:
            print("waited", flush=True)
        other = one.clone()
        print(one.get("key"), other.get("key"), flush=True)
        sys.stdin.read()
        """,
    )
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(2)] == ["waited\n", "b'newer' b'newer'\n"]
    assert len(relay.sockets) == 2  # nobody has gone past it
    program.communicate()
    assert program.returncode == 0


def test_clients_that_wait_and_count_notice_nothing_of_moves(relay: StoreRelay, store: Any) -> None:
    """Sums are exact: nothing is lost, and nothing is done twice."""
    program = client(
        relay,
        """
        counts = {"add": 0, "append": 0, "queue": 0}
        over = threading.Event()

        def wait():
            print(store().get("later"))

        def count(kind):
            mine = store()
            while not over.is_set():
                counts[kind] += 1
                if kind == "add":
                    assert mine.add("count", 1) == counts[kind]
                elif kind == "append":
                    mine.append("text", "x")
                else:
                    mine.queue_push("queue", "x")
            mine.num_keys()

        counting = [threading.Thread(target=count, args=(kind,)) for kind in counts]
        waiting = threading.Thread(target=wait)
        for thread in (waiting, *counting): thread.start()
        sys.stdin.readline()
        while min(counts.values()) <= 10 and all(thread.is_alive() for thread in counting):
            sleep(0.01)
        over.set()
        for thread in counting: thread.join()
        print(*counts.values(), flush=True)
        waiting.join()
        """,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    relays = [relay]
    while len(relay.sockets) < 4:
        time.sleep(0.01)
    for _ in range(5):
        time.sleep(0.1)
        relays.append(moved(relays[-1], store))
    program.stdin.write("\n")
    program.stdin.flush()
    counts = [int(word) for word in program.stdout.readline().split()]
    store.set("later", "now")
    out, _ = program.communicate()
    for one in relays[1:]:
        one.close()
    assert (out, program.returncode) == ("b'now'\n", 0)
    assert min(counts) > 10
    assert [store.add("count", 0), len(store.get("text")), store.queue_len("queue")] == counts


def test_what_a_client_has_said_that_another_relay_serves_is_not_passed_on(
    relay: StoreRelay, store: Any
) -> None:
    """Its last words are in the images of the other, which passes them on: a count would be made twice."""
    program = client(
        relay,
        """
        mine = store()
        print(mine.add("count", 1), flush=True)
        sys.stdin.readline()
        mine.add("count", 1)
        """,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.readline() == "1\n"
    (end,) = relay.sockets.values()
    relay.rest([end])
    program.stdin.write("\n")
    program.stdin.flush()
    assert select.select([end], [], [], 60)[0]
    relay.forget([end])
    relay.go_on([end])
    program.communicate()
    assert program.returncode == 1, "it was served"
    assert store.add("count", 0) == 1


def test_a_client_whose_store_is_gone_sees_that_it_has_hung_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = StoreRelay("127.0.0.1", listener.getsockname()[1])
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(b"\0" + relay.name.encode())
            accepted, _ = listener.accept()
            accepted.close()
            end.settimeout(30)
            assert end.recv(1) == b""
    relay.close()


def test_a_store_that_does_not_close_is_left_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitckpt.agent.migration.store_relay.CLOSING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = StoreRelay("127.0.0.1", listener.getsockname()[1])
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(b"\0" + relay.name.encode())
            accepted, _ = listener.accept()
            ends = list(relay.sockets.values())
            with pytest.raises(StoreError, match="could not be left: "):
                relay.rest(ends)
            relay.go_on(ends)
            end.settimeout(30)
            assert end.recv(1) == b""
            accepted.close()
    relay.close()


def test_other_users_and_nobody_else_can_be_told_by_the_socket(relay: StoreRelay) -> None:
    assert relay.variables["JITCKPT_STORE_RELAY"] == relay.name
    assert relay.variables["JITCKPT_STORE_ADDRESSES"].startswith("127.0.0.1:")
    assert not os.path.exists(relay.name)
