"""Between the workers' clients of the job's store, on Unix sockets, and the store, maybe of another host.

A worker that is moved keeps its sockets, for CRIU carries those whose other ends are the agent's; a
connection to the store it could not keep. The relay ends that before the move, so that the store has read
all, and makes another one afterwards (decisions/store_requests.py). It passes on what it gets and keeps no
more than what does not fit into a socket at once.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jitckpt.agent.proxies.servers import peer_of
from jitckpt.decisions.store_requests import Conversation
from jitckpt.errors import JitckptError
from jitckpt.wire.environment import STORE_ADDRESSES, STORE_RELAY

PIECE = 1 << 16  # bytes
MOST_UNSENT = 1 << 20  # bytes; who has so many to come is not listened to meanwhile
CLOSING_SECONDS = 30.0  # in which a store reads what it was sent, answers it and closes
BACKLOG = 512
PAUSE = 0.1  # seconds, where no descriptor is left for a connection


class StoreError(JitckptError):
    """The job's store could not be left, or reached; the text is a clause."""


@dataclass(eq=False)
class _Client:
    """store: None while it rests. to_store, to_client: what did not fit into the sockets yet."""

    end: socket.socket
    store: socket.socket | None
    said: Conversation = field(default_factory=Conversation)
    to_store: bytearray = field(default_factory=bytearray)
    to_client: bytearray = field(default_factory=bytearray)
    resting: bool = False
    left: bool = False  # the store was told that no more comes


class StoreRelay:
    """Of one start of this host's workers, on a thread of its own."""

    def __init__(self, host: str, port: int, name: str = "") -> None:
        """host, port: of the store. name: at which workers connect that were told it on another host.

        Raises OSError.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._store = host, port
        # Not in a folder: nothing is left should this process be killed.
        self.name = name or f"jitckpt-store-{secrets.token_hex(16)}"
        places = dict.fromkeys(":".join(map(str, place[:2])) for *_, place in found)
        self.variables = STORE_RELAY.to(self.name) | STORE_ADDRESSES.to(" ".join(places))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(b"\0" + self.name.encode())
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._clients: set[_Client] = set()
        self._written: set[bytes] = set()
        self._lock = threading.Lock()  # of all but the thread's own wait
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="jitckpt-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._ends = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for client in list(self._clients):
            self._drop(client)
        self._listener.close()
        self._selector.close()
        os.close(self._wake)

    @property
    def sockets(self) -> dict[int, socket.socket]:
        """This process's ends of all connections to clients, by their inodes."""
        with self._lock:
            return {os.fstat(one.end.fileno()).st_ino: one.end for one in self._clients}

    @property
    def written(self) -> set[bytes]:
        """The keys that clients may have changed in the store, as it has them."""
        with self._lock:
            return self._written | {key for one in self._clients for key in one.said.written}

    @property
    def store(self) -> tuple[str, int]:
        """Where the store is."""
        return self._store

    def rest(self, ends: Sequence[socket.socket]) -> None:
        """Listen to these clients no more, and leave the store, which has read by then what they have said.

        What it answers is sent on. Whether StoreError is raised or not, `go_on` is to be called in the end.
        """
        for client in self._of(ends):
            with self._lock:
                client.resting = True
                self._watch(client)
            self._leave(client)

    def conversations(self, ends: Sequence[socket.socket]) -> list[bytes]:
        """Return what another relay needs to know of clients that rest, for `take_over`."""
        return [client.said.again() for client in self._of(ends)]

    def replace(self, before: socket.socket, now: socket.socket) -> None:
        """A client that rests was made again; its other end is another socket."""
        (client,) = self._of([before])
        now.setblocking(False)
        client.end = now

    def take_over(self, end: socket.socket, said: bytes) -> None:
        """Serve a client that another relay has served; it rests."""
        end.setblocking(False)
        client = _Client(end, None, resting=True)
        client.said.asked(said)
        with self._lock:
            self._clients.add(client)

    def forget(self, ends: Sequence[socket.socket]) -> None:
        """These clients, which rest, are another relay's by now, with what they have said last."""
        for client in self._of(ends):
            with self._lock:
                self._drop(client)

    def go_on(self, ends: Sequence[socket.socket]) -> None:
        """Serve these clients, which rest, again; one whose store can't be reached finds it has hung up."""
        for client in self._of(ends):
            with self._lock:
                if not self._reaches_store(client):
                    self._drop(client)
                    continue
                client.resting = False
                self._watch(client)

    def _reaches_store(self, client: _Client) -> bool:
        if client.store is None:
            try:
                client.store = self._connected()
            except OSError:
                return False
            client.left = False
            client.to_store += client.said.again()
        return not client.left

    def _of(self, ends: Sequence[socket.socket]) -> list[_Client]:
        with self._lock:
            known = {client.end: client for client in self._clients}
        return [known[end] for end in ends if end in known]

    def _connected(self) -> socket.socket:
        store = socket.create_connection(self._store, CLOSING_SECONDS)
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        store.setblocking(False)
        return store

    def _leave(self, client: _Client) -> None:
        """Have the store read to the end and close. Raises StoreError."""
        store, until = client.store, time.monotonic() + CLOSING_SECONDS
        if client.said.unknown:
            raise StoreError(client.said.unknown)
        if store is None:
            return
        client.left = True
        try:
            for data in _last_words(store, client.to_store, until):
                client.said.answered()
                client.to_client += data
            while client.to_client:
                client.end.settimeout(max(0.001, until - time.monotonic()))
                del client.to_client[: client.end.send(client.to_client)]
        except OSError as error:
            raise StoreError(f"the job's store could not be left: {error}") from error
        finally:
            client.end.setblocking(False)
        client.to_store.clear()
        if obstacle := client.said.obstacle():
            raise StoreError(obstacle)
        store.close()
        client.store = None

    def _run(self) -> None:
        while True:
            ready = self._selector.select()
            if self._ends:
                return
            with self._lock:
                for key, events in ready:
                    if key.fileobj == self._wake:
                        os.eventfd_read(self._wake)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients and not key.data.resting:
                        self._serve(key.data, key.fileobj, events)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors: it waits until there are
            time.sleep(PAUSE)
            return
        try:
            _, user = peer_of(accepted)
            store = self._connected() if user == os.getuid() else None
        except OSError:
            store = None  # it finds that out as it would have without the relay
        if store is None:
            accepted.close()
            return
        accepted.setblocking(False)
        client = _Client(accepted, store)
        self._clients.add(client)
        self._watch(client)

    def _serve(self, client: _Client, file: object, events: int) -> None:
        assert client.store is not None
        try:
            if events & selectors.EVENT_READ:
                data = (client.end if file is client.end else client.store).recv(PIECE)
                if not data:
                    self._drop(client)
                    return
                if file is client.end:
                    client.said.asked(data)
                    client.to_store += data
                else:
                    client.said.answered()
                    client.to_client += data
            _send(client.store, client.to_store)
            _send(client.end, client.to_client)
        except OSError:
            self._drop(client)
            return
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        """Have the thread wait for what the client's two sockets can do now."""
        for file, own, others in (
            (client.end, client.to_client, client.to_store),
            (client.store, client.to_store, client.to_client),
        ):
            if file is None:
                continue
            events = selectors.EVENT_WRITE if own else 0
            events |= selectors.EVENT_READ if len(others) < MOST_UNSENT else 0
            registered = file in self._selector.get_map()
            if client.resting or not events:
                if registered:
                    self._selector.unregister(file)
            elif registered:
                if self._selector.get_key(file).events != events:
                    self._selector.modify(file, events, client)
            else:
                self._selector.register(file, events, client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._written |= client.said.written
        for file in (client.end, client.store):
            if file is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(file)
                file.close()


def _send(to: socket.socket, data: bytearray) -> None:
    """Send as much as goes at once."""
    with contextlib.suppress(BlockingIOError):
        while data:
            del data[: to.send(data)]


def _last_words(store: socket.socket, unsent: bytearray, until: float) -> Iterator[bytes]:
    """Send the store what it lacks, say that no more comes, and yield what it answers until it closes."""
    while unsent:
        store.settimeout(max(0.001, until - time.monotonic()))
        del unsent[: store.send(unsent)]
    store.shutdown(socket.SHUT_WR)
    while True:
        store.settimeout(max(0.001, until - time.monotonic()))
        data = store.recv(PIECE)
        if not data:
            return
        yield data
