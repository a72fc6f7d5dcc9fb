"""How fast a shard goes to another host's memory and comes back, against the same bytes by raw TCP.

    python scripts/bench/memory_transfer.py [--mib 256] [--pairs 7] [--json]

The other host is an agent in a process of its own, on the loopback network. Each pair is one transfer after
the other on that link; a ratio is the median of the pairs', of times and, where processors are scarce and
others use them, too, of the processor time that both processes take. Also xxh3 of the shard against a copy.
"""

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from jitckpt.hosts import connections
from jitckpt.hosts.connections import Hosts
from jitckpt.saves.layout import Identity
from jitckpt.tiers import chunks, host_memory, peers, shard
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.peers import PeerMemory
from jitckpt.wire.hosts import Host

HERE = "127.0.0.1"
IDENTITY = Identity("job", "f", 2, 0, 0, 2)


def filled(size: int) -> HostMemory:
    """Return memory with one shard of rank 0 after step 1."""
    memory = HostMemory()
    descriptor = memory.of(0)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().data
    host_memory.write(descriptor, data, host_memory.data_place(1))
    digests = chunks.digests(chunks.window(descriptor, host_memory.data_place(1), size))
    checksums = [one.hex() for one in digests]
    index = shard.Index(IDENTITY, 1, "a", 0.0, checksums, {"all": ("uint8", [size], 0)}, size, {}).encode()
    host_memory.seal(descriptor, 1, index, shard.seal_of(index, 1, size))
    return memory


def other_host(listener: socket.socket, known: Sequence[Host], size: int, done: Connection) -> None:
    """The other agent's process; on `done` it hears of the end."""
    hosts = Hosts(1, known, listener, b"secret", 60.0)
    memory = HostMemory()
    hosts.answers[peers.VISIT] = partial(peers.serve, memory, lambda rank: None)
    raw = socket.create_server((HERE, 0))
    done.send(raw.getsockname()[1])
    threading.Thread(target=take_raw, args=(raw, size), daemon=True).start()
    hosts.connect(60.0)
    done.recv()
    hosts.close()
    memory.close()


def take_raw(listener: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(size))
    while True:
        connection, _ = listener.accept()
        with connection:
            got = 0
            while got < size:
                got += connection.recv_into(buffer[got:])
            connection.sendall(b"!")


def send_raw(port: int, data: memoryview) -> None:
    with socket.create_connection((HERE, port)) as connection:
        connection.sendall(data)
        connection.recv(1)


class Clock:
    """Seconds, and those of the processor, that this process and another one take for a call."""

    def __init__(self, other: int) -> None:
        self._other = Path(f"/proc/{other}/stat")

    def measure(self, call: Callable[[], object]) -> tuple[float, float]:
        began, used = time.perf_counter(), self._used()
        call()
        return time.perf_counter() - began, self._used() - used

    def _used(self) -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        user, system = self._other.read_text().rpartition(")")[2].split()[11:13]
        return own.ru_utime + own.ru_stime + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measured(size: int, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Return seconds, and those of processors, of each way."""
    memory, again = filled(size), HostMemory()
    listeners = [connections.listen(HERE) for _ in range(2)]
    known = [Host(HERE, one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    other = fork.Process(target=other_host, args=(listeners[1], known, size, theirs))
    other.start()
    assert other.pid is not None
    listeners[1].close()
    hosts = Hosts(0, known, listeners[0], b"secret", 60.0)
    port = ours.recv()
    hosts.connect(60.0)
    peer, clock = PeerMemory(hosts, 1), Clock(other.pid)
    one = memory.shard(0, 1, "a")
    digests = shard.parse_index(one.index, one.seal).digests
    data, target = memoryview(one.window), bytearray(size)
    ways: dict[str, Callable[[], object]] = {
        "raw TCP": lambda: send_raw(port, data),
        "put": lambda: peer.put(memory.shard(0, 1, "a")),
        "get": lambda: peer.get(0, 1, "a", again),
        "copy": lambda: memoryview(target).__setitem__(slice(None), data),
        "xxh3": lambda: chunks.verify(one.window, digests),
    }
    for call in ways.values():  # all memory is there before anything is measured
        call()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name, call in ways.items():
            found[name].append(clock.measure(call))
    ours.send(None)
    hosts.close()
    other.join()
    memory.close()
    again.close()
    return found


def ratio(found: dict[str, list[tuple[float, float]]], name: str, to: str, which: int) -> float:
    """Return how fast a way is by another one: 0 by time, 1 by processor time."""
    pairs = zip(found[name], found[to], strict=True)
    return statistics.median(other[which] / max(1e-9, one[which]) for one, other in pairs)


def bytes_moved(size: int, pairs: int) -> dict[str, float]:
    """Return bytes per second of each way."""
    found = measured(size, pairs)
    return {name: size / statistics.median(times for times, _ in of) for name, of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of a shard (default 256)")
    parser.add_argument("--pairs", type=int, default=7, help="how often each is done (default 7)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size = args.mib << 20
    found = measured(size, args.pairs)
    ratios = [("put", "raw TCP"), ("get", "raw TCP"), ("xxh3", "copy")]
    told = {
        f"{one} / {other}": [ratio(found, one, other, which) for which in (0, 1)] for one, other in ratios
    }
    rates = {name: size / statistics.median(times for times, _ in of) for name, of in found.items()}
    if args.json:
        print(json.dumps({"bytes_per_second": rates, "ratios": told}))
        return
    for name, rate in rates.items():
        print(f"{name:8} {rate / 1e9:6.2f} GB/s")
    for name, (by_time, by_processor) in told.items():
        print(f"{name:14} {by_time:5.2f} by time, {by_processor:5.2f} by processor time")


if __name__ == "__main__":
    main()
