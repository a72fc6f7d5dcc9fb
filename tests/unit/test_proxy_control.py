"""The agent's sockets to device proxies: who is listened to, and a recovery over them."""

import os
import resource
import selectors
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transparent_proxies import Proxy

from jitckpt.agent.proxies.control import ControlSocket, Proxies
from jitckpt.agent.proxies.exchange import ExchangeSettings
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived
from jitckpt.wire import agents, proxy_messages
from jitckpt.wire.proxy_messages import Hello, decode, encode


class Host:
    """An agent's proxies, and clients that connect to them. sent: what is on its way to other hosts."""

    def __init__(
        self,
        ranks: dict[int, int],
        others: Any = None,
        exchange: ExchangeSettings | None = None,
        adopted: Mapping[int, socket.socket] | None = None,
    ) -> None:
        """adopted: by rank, those that have come from another host."""
        self.control = ControlSocket()
        self.path = self.control.path
        self.log = EventLog()
        self.said: list[str] = []
        self.sent: list[tuple[int, agents.AgentMessage, bytes]] = []
        self.proxies = Proxies(
            self.control,
            ranks,
            self.log,
            say=self.said.append,
            deadline=60.0,
            hosts=others and others(self),
            exchange=exchange,
        )
        self.selector = selectors.DefaultSelector()
        for rank, control in (adopted or {}).items():
            self.proxies.adopt(rank, control)
        self.proxies.watch(self.selector)
        self.clients: dict[int, socket.socket] = {}

    def connect(self, first: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.setblocking(False)
        client.connect(str(self.path))
        client.send(first)
        self.listen()
        return client

    def listen(self) -> None:
        while ready := self.selector.select(0):
            for key, _ in ready:
                if key.fd in self.selector.get_map():
                    key.data()

    def close(self) -> None:
        self.selector.close()
        self.proxies.close()
        for client in self.clients.values():
            client.close()

    def events(self) -> list[str]:
        return [event["event"] for event in self.log.events]


def take(client: socket.socket) -> bytes | None:
    """Return the next message; None if there is none yet, b"" at the end."""
    try:
        return client.recv(proxy_messages.MAX_BYTES)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def play(host: Host, proxies: list[Proxy]) -> None:
    """Let the proxies carry out what they are told until nothing is left."""
    busy = True
    while busy:
        busy = False
        for proxy in proxies:
            data = take(host.clients[proxy.rank])
            if data:
                busy = True
                order = decode(data)
                assert not isinstance(order, proxy_messages.FromProxy)
                answer = proxy.hear(order)
                if answer is not None:
                    host.clients[proxy.rank].send(encode(answer))
                host.listen()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host({0: os.getsid(0), 1: os.getsid(0), 2: 1})
    yield made
    made.close()


def test_the_socket_is_its_owners_alone_and_goes_once_all_have_come() -> None:
    host = Host({0: os.getsid(0)})
    folder = host.path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(host.path.stat().st_mode) == 0o600
    host.clients[0] = host.connect(encode(Proxy(0, 1).hello()))
    assert not folder.exists()
    assert take(host.clients[0]) is None
    host.close()


def test_a_folder_with_a_long_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    control = ControlSocket()
    assert len(os.fsencode(control.path)) <= 107
    assert list(long.iterdir()) == []
    control.close()
    control.close()
    assert not control.path.parent.exists()


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"", None),
        (b"nonsense", "ends too early"),
        (encode(proxy_messages.Done((0, 0), 0, 0, 0, 0, 0, 0)), "begins with Done in place of Hello"),
        (encode(proxy_messages.Stop((0, 0))), "begins with Stop in place of Hello"),
        (encode(Hello((0, 0), os.getpid(), 2, "cafe")), "says that it is rank 2"),
        (encode(Hello((0, 0), os.getpid(), 3, "cafe")), "says that it is rank 3"),
    ],
    ids=["nothing", "nonsense", "done", "stop", "rank 2", "rank 3"],
)
def test_strangers_are_not_listened_to(host: Host, first: bytes, why: str | None) -> None:
    client = host.connect(first)
    assert take(client) == b""
    client.close()
    assert [why is not None and why in event["text"] for event in host.log.events] == [True] * (
        why is not None
    )


def test_the_second_of_a_rank_is_not_listened_to(host: Host) -> None:
    host.clients[0] = host.connect(encode(Proxy(0, 2).hello()))
    second = host.connect(encode(Proxy(0, 2).hello()))
    assert take(second) == b""
    assert take(host.clients[0]) is None
    second.close()
    assert "is the second of rank 0" in host.log.events[-1]["text"]


def test_a_recovery_over_the_sockets() -> None:
    host = Host({0: os.getsid(0), 1: os.getsid(0)})
    proxies = [Proxy(0, 2), Proxy(1, 2)]
    for proxy in proxies:
        host.clients[proxy.rank] = host.connect(encode(proxy.hello()))
    host.clients[1].send(encode(proxies[1].alarm()))
    host.listen()
    assert host.proxies.next_look is not None
    play(host, proxies)
    assert [(proxy.state, proxy.held, proxy.server) for proxy in proxies] == [(7, False, 0)] * 2
    assert host.proxies.next_look is None
    assert host.proxies.recovers
    assert len(host.said) == 1
    assert host.said[0].startswith(
        "its server was ended by Killed (rank 1): all ranks went back to the state after step 7"
    )
    host.clients[0].close()
    host.clients[1].send(encode(proxies[1].alarm()))
    host.listen()
    play(host, proxies[1:])
    assert "rank 0 is gone: its device proxy has hung up" in proxies[1].given_up
    assert "rank 0 is gone" in host.said[1]
    assert not host.proxies.recovers
    host.close()


class Cable:
    """The other hosts, as far as proxies need them: what is sent arrives when the test says so."""

    def __init__(self, index: int, host: Host) -> None:
        self.index, self._host = index, host
        self.all = [SimpleNamespace(ranks=(rank,), ranks_of=-1) for rank in (0, 1)]

    def host_of(self, rank: int) -> int:
        return next(number for number, host in enumerate(self.all) if rank in host.ranks)

    def send(self, host: int, message: agents.AgentMessage, data: bytes = b"") -> None:
        self._host.sent.append((host, message, data))


def run_together(hosts: list[Host], proxies: list[Proxy]) -> None:
    """Let the hosts hear each other, and their proxies do what they are told, until nothing is left."""
    while any(host.sent for host in hosts):
        for index, host in enumerate(hosts):
            sent, host.sent = host.sent, []
            for to, message, data in sent:
                hosts[to].proxies.hear_host(Arrived(index, message, data))
        for host, proxy in zip(hosts, proxies, strict=True):
            if host.clients[proxy.rank].fileno() >= 0:
                play(host, [proxy])


def test_that_ranks_have_moved_to_another_host_stands_in_the_leaders_log() -> None:
    hosts = [Host({rank: os.getsid(0)}, lambda host, rank=rank: Cable(rank, host)) for rank in (0, 1)]
    moved = agents.RanksMoved([1], size=9, dump=1.0, transfer=2.0, restore=3.0)
    for host in hosts:
        host.proxies.hear_host(Arrived(1, moved, b""))
        host.close()
    (event,) = hosts[0].log.events
    told = {"host": 1, "ranks": [1], "bytes": 9, "dump": 1.0, "transfer": 2.0, "restore": 3.0}
    assert event["event"] == "ranks_moved"
    assert event.items() >= told.items()
    assert hosts[1].log.events == []


def test_two_hosts_agree_through_the_first() -> None:
    hosts = [Host({rank: os.getsid(0)}, lambda host, rank=rank: Cable(rank, host)) for rank in (0, 1)]
    proxies = [Proxy(0, 2), Proxy(1, 2)]

    for host, proxy in zip(hosts, proxies, strict=True):
        host.clients[proxy.rank] = host.connect(encode(proxy.hello()))
    hosts[1].clients[1].send(encode(proxies[1].alarm()))
    hosts[1].listen()
    run_together(hosts, proxies)
    assert [(proxy.state, proxy.held, proxy.server) for proxy in proxies] == [(7, False, 0)] * 2
    assert "recovered" in hosts[0].events()
    assert hosts[1].proxies.next_look is None
    # Without the first nobody agrees any more.
    hosts[1].proxies.lose_host(0)
    play(hosts[1], proxies[1:])
    assert "the host that would lead it is lost" in proxies[1].given_up
    # One that hangs up is missed when it is needed.
    hosts[1].clients[1].close()
    hosts[1].listen()
    assert hosts[1].sent == [(0, agents.ProxyGone(1, "its device proxy has hung up"), b"")]
    run_together(hosts, proxies)
    hosts[0].clients[0].send(encode(proxies[0].alarm()))
    hosts[0].listen()
    play(hosts[0], proxies[:1])
    assert "rank 1 is gone: its device proxy has hung up" in proxies[0].given_up
    for host in hosts:
        host.close()


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("leads", [True, False])
def test_a_rank_has_another_device_before_its_error_is_delivered(leads: bool, free: bool) -> None:
    """Its calls fail with the new server as before. Nobody but its own host knows which devices there are."""
    rank = 0 if leads else 1
    proxies = [Proxy(0, 2), Proxy(1, 2)]
    moved: list[int] = []

    def move(ranks: Sequence[int]) -> None:  # as another device: the calls do not fail there
        moved.extend(ranks)
        proxies[rank].failing = None

    exchange = ExchangeSettings(("0", "1") if free else ("0",), {}, move)
    hosts = [
        Host({own: os.getsid(0)}, lambda host, own=own: Cable(own, host), exchange if own == rank else None)
        for own in (0, 1)
    ]
    for host, proxy in zip(hosts, proxies, strict=True):
        host.clients[proxy.rank] = host.connect(encode(proxy.hello()))
    run_together(hosts, proxies)
    lost = (40, "CUDA error 999: unknown error")
    proxies[rank].failing = lost
    hosts[rank].clients[rank].send(encode(proxies[rank].alarm(*lost)))
    hosts[rank].listen()
    run_together(hosts, proxies)
    assert [(proxy.state, proxy.held) for proxy in proxies] == [(7, False)] * 2
    assert proxies[rank].got_error is not free
    assert moved == ([rank] if free else [])
    said = f"device 0 of rank {rank} is broken"
    told = (
        f"{said}; the rank goes on with device 1."
        if free
        else f"{said}: it fails with a new server, too. No other device of this host is free."
    )
    assert told in hosts[rank].said
    for host in hosts:
        host.close()


class LeftFirst:
    """Two hosts of a rank each, of which the first one's rank leaves it where it can't go on.

    A third one takes it, where somebody stands by: `takes`.
    """

    def __init__(self, *, takes: bool = True) -> None:
        self.takes, self.left = takes, list[bytes]()
        self.proxies = [Proxy(0, 2), Proxy(1, 2)]
        self.cables: list[Cable] = []
        exchange = ExchangeSettings(("0",), {}, can_leave=lambda: True, leave=self.leave)
        self.hosts = [
            Host({own: os.getsid(0)}, self.cable(own), exchange if own == 0 else None) for own in (0, 1)
        ]
        for host, proxy in zip(self.hosts, self.proxies, strict=True):
            host.clients[proxy.rank] = host.connect(encode(proxy.hello()))
        self.play()

    def cable(self, index: int) -> Any:
        def made(host: Host) -> Cable:
            self.cables.append(Cable(index, host))
            return self.cables[-1]

        return made

    def leave(self, orders: Mapping[int, bytes]) -> bool:
        """The first host's rank goes on on one more, which comes."""
        self.left += orders.values()
        if not self.takes:
            return False
        for cable in self.cables:
            cable.all[0].ranks = ()
            cable.all.append(SimpleNamespace(ranks=(0,), ranks_of=0))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        third = Host({0: os.getsid(0)}, lambda host: Cable(2, host), adopted={0: ours})
        third.clients[0] = theirs
        self.hosts.append(third)
        self.proxies[0].failing = None
        third.proxies.hear_host(Arrived(0, agents.ProxyOrder(0), orders[0]))
        return True

    def fail(self, rank: int, *, for_good: bool = False) -> None:
        lost = (40, "CUDA error 999: unknown error")
        self.proxies[rank].failing = lost if for_good else None
        host = next(one for one in reversed(self.hosts) if rank in one.clients)
        host.clients[rank].send(encode(self.proxies[rank].alarm(*lost)))
        host.listen()
        self.play()

    def play(self) -> None:
        """Let all hear each other, as a supervisor does, until nothing is left."""
        busy = True
        while busy:
            busy = False
            for number, host in enumerate(self.hosts):
                for rank, client in host.clients.items():
                    if self.hosts[-1].clients.get(rank, client) is client:
                        play(host, [self.proxies[rank]])
                before = len(self.left)
                host.proxies.look()
                sent, host.sent = host.sent, []
                busy = busy or bool(sent) or len(self.left) > before
                for to, message, data in sent:
                    self.hosts[to].proxies.hear_host(Arrived(number, message, data))

    def close(self) -> None:
        for host in self.hosts:
            host.close()


@pytest.fixture
def left(request: pytest.FixtureRequest) -> Iterator[LeftFirst]:
    found = LeftFirst(takes=getattr(request, "param", True))
    yield found
    found.close()


def test_the_first_hosts_rank_leaves_it_and_that_host_has_the_lead_on(left: LeftFirst) -> None:
    left.fail(0, for_good=True)
    assert [len(left.left), len(left.hosts)] == [1, 3]
    assert [(proxy.state, proxy.held, proxy.got_error) for proxy in left.proxies] == [(7, False, False)] * 2
    first = left.hosts[0]
    assert (first.proxies.moved, first.proxies.leads, first.proxies.next_look) == (True, True, None)
    assert take(first.clients[0]) == b"", "it still listens to the rank"
    for rank in (0, 1):  # wherever a rank fails afterwards
        left.fail(rank)
    assert first.events().count("recovered") == 3
    assert [(proxy.state, proxy.held) for proxy in left.proxies] == [(7, False)] * 2
    left.hosts[2].clients[0].close()
    left.hosts[2].listen()
    del left.hosts[2].clients[0]
    del left.hosts[0].clients[0]
    left.fail(1)
    assert "rank 0 is gone: its device proxy has hung up" in left.proxies[1].given_up


@pytest.mark.parametrize("left", [False], indirect=True)
def test_where_nobody_takes_the_first_hosts_rank_it_gets_its_error_there(left: LeftFirst) -> None:
    left.fail(0, for_good=True)
    assert [len(left.left), len(left.hosts)] == [1, 2]
    assert [(proxy.state, proxy.held) for proxy in left.proxies] == [(7, False)] * 2
    assert left.proxies[0].got_error
    assert not left.hosts[0].proxies.moved


def test_a_failure_elsewhere_before_the_first_hosts_rank_has_left_comes_first(left: LeftFirst) -> None:
    """It leaves in the recovery after that one."""
    first, lost = left.hosts[0], (40, "CUDA error 999: unknown error")
    left.proxies[0].failing = lost
    first.clients[0].send(encode(left.proxies[0].alarm(*lost)))
    first.listen()
    while first.proxies.next_look != 0.0:  # it is about to leave
        run_together(left.hosts, left.proxies)
        first.listen()
    left.hosts[1].clients[1].send(encode(left.proxies[1].alarm()))
    left.hosts[1].listen()
    left.play()
    assert len(left.left) == 1
    assert [(proxy.state, proxy.held, proxy.got_error) for proxy in left.proxies] == [(7, False, False)] * 2


def test_ranks_whose_devices_break_together_are_made_anew_together() -> None:
    """CRIU has them side by side; the third rank has its order at once."""
    proxies = [Proxy(rank, 3) for rank in range(3)]
    moved: list[list[int]] = []

    def move(ranks: Sequence[int]) -> None:
        moved.append(list(ranks))
        for rank in ranks:
            proxies[rank].failing = None

    exchange = ExchangeSettings(tuple("012345"), {}, move)
    host = Host(dict.fromkeys(range(3), os.getsid(0)), exchange=exchange)
    for proxy in proxies:
        host.clients[proxy.rank] = host.connect(encode(proxy.hello()))
    play(host, proxies)
    lost = (40, "CUDA error 999: unknown error")
    for rank in (0, 2):
        proxies[rank].failing = lost
        host.clients[rank].send(encode(proxies[rank].alarm(*lost)))
    host.listen()
    play(host, proxies)
    assert [(proxy.state, proxy.held, proxy.got_error) for proxy in proxies] == [(7, False, False)] * 3
    assert moved == [[0, 2]]
    host.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_comes_when_no_descriptor_is_left_is_let_in_later(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({0: os.getsid(0)})
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for client, path in zip(clients, (host.path, host.control.servers_path), strict=True):
        client.setblocking(False)
        client.connect(str(path))
    with no_descriptor_left():
        host.listen()  # and it comes to an end
        assert host.selector.select(0) == [], "nothing is looked at in vain"
        assert host.proxies.next_look is not None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    host.proxies.look()
    clients[0].send(encode(Proxy(0, 1).hello()))
    host.listen()
    assert host.events() == ["proxy_connected"]
    assert host.proxies.next_look is None
    for client in clients:
        client.close()
    host.close()


def test_a_crowd_that_does_not_say_who_it_is_keeps_nobody_out(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitckpt.agent.proxies.control.MOST_STRANGERS", 3)
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    for stranger in crowd:
        stranger.connect(str(host.path))
        host.listen()
    host.clients[0] = host.connect(encode(Proxy(0, 2).hello()))
    assert take(host.clients[0]) is None
    assert [stranger.recv(9) for stranger in crowd[:17]] == [b""] * 17
    for stranger in crowd:
        stranger.close()
