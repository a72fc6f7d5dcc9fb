"""Whatever is said to an agent, and by whomever, its control thread and its connections live on.

A few conversations of each kind here; JITCKPT_CONVERSATIONS=10000 has as many.
"""

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_protocol import json_values, values_for

from jitckpt.agent.processes.workers import Worker
from jitckpt.agent.proxies.control import ControlSocket, Proxies
from jitckpt.agent.reports import Reports
from jitckpt.agent.supervisor import Supervisor
from jitckpt.decisions.recovery import Outcome
from jitckpt.encoding.tree_codec import encode
from jitckpt.errors import SaveError
from jitckpt.events import EventLog
from jitckpt.hosts import connections, link
from jitckpt.hosts.connections import Hosts
from jitckpt.ring import format as ring_format
from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.ring.tail import Tail
from jitckpt.saves.layout import Identity
from jitckpt.wire import checked, protocol, proxy_messages
from jitckpt.wire.hosts import Host

COUNT = int(os.environ.get("JITCKPT_CONVERSATIONS", "50"))
many = settings(
    max_examples=COUNT,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SECONDS = 60.0
SECRET = b"what only this job's agents know"
raw_json = json_values.map(lambda value: json.dumps(value).encode())


# The control thread, and what its workers say.


class PlayedWorker:
    """A worker of which there is nothing but its socket; it ends when it is told to."""

    receive, send = Worker.receive, Worker.send
    pid, copies = 1 << 30, None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.pidfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.ring_fd = local_state.create()
        self.lifeline: Any = SimpleNamespace(watch=lambda: None, released=os.eventfd(0, os.EFD_NONBLOCK))

    def has_ended(self, within: float) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def is_stopped(self) -> bool:
        return False

    def dies_with(self) -> None:
        return None

    def signal(self, signum: int) -> None:
        os.eventfd_write(self.pidfd, 1)

    def reap(self) -> int:
        return -signal.SIGKILL

    def close(self) -> None:
        self.socket.close()
        self.theirs.close()
        for descriptor in (self.pidfd, self.ring_fd, self.lifeline.released):
            os.close(descriptor)


text = st.text(st.characters(exclude_categories=(), exclude_characters="/"), max_size=20)


def said(cls: type[protocol.WorkerMessage]) -> st.SearchStrategy[bytes]:
    """What is a message of this kind but for parts of it."""
    hints = checked.hints(cls)
    values = {f.name: values_for(hints[f.name]) | json_values | text for f in fields(cls)}
    values |= {"rank": st.integers(0, 3), "type": st.just(cls.type)}
    values |= {name: st.just(1) for name in ("save_id", "world_size", "shards") if name in values}
    return st.fixed_dictionaries(values).map(
        lambda content: json.dumps(content).encode("utf-8", "surrogatepass")[: protocol.MAX_BYTES + 9]
    )


def right(cls: type[protocol.WorkerMessage]) -> st.SearchStrategy[bytes]:
    """A message of this kind, all of it of the right types."""
    hints = checked.hints(cls)
    values = {f.name: values_for(hints[f.name]) for f in fields(cls)}
    small = {"rank": 0, "world_size": 2, "shard": 0, "shards": 1, "save_id": 1}
    values |= {name: st.just(value) for name, value in small.items() if name in values}
    values |= {"checkpoint_dir": st.just("elsewhere")} if "checkpoint_dir" in values else {}
    return st.fixed_dictionaries(values).map(
        lambda content: json.dumps({"type": cls.type} | content).encode()
    )


long_error = st.just(
    json.dumps({"type": "nccl_error", "operation": "o", "result": 1, "text": "\u20ac" * 10_000}).encode()
)
worker_says = st.one_of(
    [st.binary(max_size=40), raw_json, long_error]
    + [strategy(cls) for cls in (*protocol.FROM_WORKER, *protocol.FROM_AGENT) for strategy in (said, right)]
)


@many
@given(st.lists(st.tuples(st.integers(0, 1), worker_says), max_size=12))
def test_a_control_thread_lives_whatever_its_workers_say(
    tmp_path: Path, conversation: list[tuple[int, bytes]]
) -> None:
    os.chdir(tmp_path)
    workers = [PlayedWorker(0), PlayedWorker(1)]
    played: Any = workers
    reports = Reports(
        heard=lambda *_: None,
        registered=lambda *_: None,
        failed=lambda *_: None,
        write_local_states=lambda *_: {},
    )
    supervisor = Supervisor(
        workers=played,
        log=EventLog(tmp_path),
        reports=reports,
        save_id=1,
        save_deadline=0.01,
        restarts_left=1,
    )
    supervisor.start()
    for rank, data in conversation:
        if data:
            workers[rank].theirs.send(data[: protocol.MAX_BYTES + 9])
    supervisor.stop(signal.SIGTERM)
    try:
        assert supervisor.result() in Outcome, "it ended by itself"
    finally:
        for worker in workers:
            worker.close()


# What device proxies say.

numbers = st.integers(0, 3) | st.integers(-(1 << 63), (1 << 64) - 1)


def field(form: Any) -> st.SearchStrategy[bytes]:
    if form is proxy_messages._TEXT:
        return st.binary(max_size=20).map(lambda text: struct.pack("<I", len(text)) + text)
    if form is proxy_messages._KEY:
        return st.sampled_from([bytes(16), b"\1" * 16, b"\2" * 16])
    if isinstance(form, str):
        size = struct.calcsize(f"<{form}")
        return numbers.map(lambda number: (number % (1 << 8 * min(size, 8))).to_bytes(size, "little"))
    part = st.tuples(*map(field, proxy_messages._FORMS[form])).map(b"".join)
    return st.lists(part, max_size=2).map(lambda parts: struct.pack("<I", len(parts)) + b"".join(parts))


def datagram(number: int) -> st.SearchStrategy[bytes]:
    head = st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda recovery: proxy_messages._HEADER.pack(number, proxy_messages.VERSION, *recovery)
    )
    rest = st.tuples(*map(field, proxy_messages._FORMS[proxy_messages._KINDS[number]])).map(b"".join)
    return st.tuples(head, rest).map(b"".join)


proxy_says = st.one_of([st.binary(max_size=60), *map(datagram, proxy_messages._KINDS)])


def hello(rank: int) -> bytes:
    return proxy_messages.encode(proxy_messages.Hello((0, 0), os.getpid(), rank, "cafe"))


@many
@given(
    st.lists(st.tuples(st.integers(0, 2), proxy_says), max_size=12),
    st.lists(st.sampled_from([0, 1]), max_size=2),
)
def test_a_control_thread_lives_whatever_device_proxies_say(
    conversation: list[tuple[int, bytes]], greeted: list[int]
) -> None:
    control, log = ControlSocket(), EventLog()
    # Rank 2 never comes, so the door stays open.
    ranks = {0: os.getsid(0), 1: os.getsid(0), 2: 1}
    proxies = Proxies(control, ranks, log, say=lambda text: None, deadline=0.001)
    selector = selectors.DefaultSelector()
    proxies.watch(selector)
    clients = []

    def listen() -> None:
        for _ in range(1000):
            ready = selector.select(0)
            for key, _ in ready:
                if key.fd in selector.get_map():
                    key.data()
            proxies.look()
            if not ready:
                return
        raise AssertionError("it never comes to rest")

    try:
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client.setblocking(False)
            client.connect(str(control.path))
            clients.append(client)
        listen()
        for rank in greeted:
            send(clients[rank], hello(rank))
        for place, data in conversation:
            send(clients[place], data)
            listen()
        listen()
        proxies.ended(0, failed=True, how="it was killed")
        proxies.ended(1, failed=False, how="it has ended")
        listen()
    finally:
        selector.close()
        proxies.close()
        for client in clients:
            client.close()


def send(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is not listened to any more
        client.send(data)


# What comes to the port of an agent.


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Hosts]]:
    listeners = [connections.listen("127.0.0.1") for _ in range(2)]
    known = [Host("127.0.0.1", one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
    made = [Hosts(i, known, listener, SECRET, SECONDS) for i, listener in enumerate(listeners)]
    made[1]._thread.start()
    made[0].connect(SECONDS)
    yield made
    for one in made:
        one.close()


def proof(role: bytes, called: bytes, caller: bytes) -> bytes:
    return link._proof(SECRET, role, called, caller)


@many
@given(st.booleans(), st.lists(st.binary(max_size=40) | raw_json.map(lambda text: text[:60]), max_size=4))
def test_a_link_lives_whatever_comes_to_its_port(
    pair: list[Hosts], knows_secret: bool, conversation: list[bytes]
) -> None:
    with socket.create_connection(("127.0.0.1", pair[0].all[0].port), SECONDS) as stranger:
        greeting = stranger.recv(40, socket.MSG_WAITALL)
        if knows_secret:
            stranger.sendall(bytes(32) + proof(b"caller", greeting[8:], bytes(32)))
            stranger.recv(32, socket.MSG_WAITALL)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for data in conversation:
                framed = knows_secret and len(data) % 2
                stranger.sendall(struct.pack(">II", len(data), 0) + data if framed else data)
    heard = threading.Event()
    pair[1].confirm(0, heard.set)
    assert heard.wait(SECONDS), "the two that belong together are still connected"
    assert pair[0].lost == pair[1].lost == frozenset()


# What lies in a ring.


def written_ring() -> bytes:
    descriptor = local_state.create()
    identity = Identity(job="j", fingerprint="f", world_size=2, rank=1, shard=0, shards=1)
    recorder = Recorder(Ring(descriptor, identity, 2, 1 << 18), lambda *_: None, lambda text: None)
    for step in (1, 2):
        recorder.write(step, True, {"random": encode({"step": step}, "random")})
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    return data


places = st.integers(0, 255) | st.integers(0, 1 << 13) | st.integers(0, 1 << 20)


@pytest.fixture(scope="module")
def ring_bytes() -> bytes:
    return written_ring()


def sealed(content: Any) -> bytes:
    """A host part that says this, with all that makes it whole."""
    said = content if isinstance(content, bytes) else json.dumps(content).encode()
    blob = bytearray(ring_format.BLOB_HEADER.size) + struct.pack("<I", len(said)) + said
    ring_format.seal(blob, 99, 7)
    return bytes(blob)


documents = st.fixed_dictionaries(
    {name: json_values for name in ("regions", "final", "trees", "left_out")}
) | st.fixed_dictionaries(
    {"final": st.booleans(), "trees": json_values, "left_out": st.just([])}
    | {"regions": st.dictionaries(st.sampled_from(["true", "false"]), json_values)}
)


@many
@given(
    st.lists(st.tuples(places, st.binary(min_size=1, max_size=9)), max_size=3),
    st.booleans(),
    st.none() | st.binary(max_size=40) | json_values | documents,
)
def test_a_ring_that_holds_anything_is_read_or_refused(
    ring_bytes: bytes, changes: list[tuple[int, bytes]], is_cut: bool, part: Any
) -> None:
    descriptor = local_state.create()
    try:
        os.pwrite(descriptor, ring_bytes, 0)
        if part is not None:
            os.pwrite(descriptor, sealed(part), ring_format.PAGE)
        for place, data in changes:
            os.pwrite(descriptor, data, place)
        if is_cut and changes:
            os.ftruncate(descriptor, changes[0][0])
        reads: list[Any] = [local_state.read, local_state.read_identity]
        reads += [lambda one: local_state.newest_step([one]), lambda one: Tail(one).news()]
        for read in reads:
            with contextlib.suppress(SaveError):
                read(descriptor)
    finally:
        os.close(descriptor)
