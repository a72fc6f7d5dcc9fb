"""GEMINI's Figure 16: how long a minibatch takes, by how snapshots are sent beside it on a slow link.

    sudo chrt --rr 10 python scripts/bench/memory_interleaving.py [--rounds 5] [--mib 8] [--json]

Two hosts are network namespaces. The training is played: it computes (sleeps), and sends messages over the
link, each after the one before; then it waits for its snapshot, if that is not whole. The snapshots go by the
sender and the pace of the memory tier; when, is planned from the baseline's minibatches, as by the agent.
Without a pipeline each chunk, as large as all four buffers, is confirmed before the next one goes.
"""

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from jitckpt import _memory_tier
from jitckpt._memory_tier import Pace, Window
from jitckpt.decisions import idle_time
from jitckpt.decisions.idle_time import BUFFERS, CHUNK_BYTES, Idle, Minibatch
from jitckpt.rehearsal.namespaces import namespaces
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import AWAITED, MINIBATCH, NETWORK_USED, PAGE

THERE, PORT = "10.79.0.2", 29501
MOST_SNAPSHOT = 64 << 20
# Of a minibatch: seconds of computing, and then bytes that go over the network.
MINIBATCH_PARTS = (*[(0.03, 1 << 20)] * 3, (0.3, 1 << 20), *[(0.03, 1 << 20)] * 3, (0.3, 1 << 20))
MINIBATCHES = 5  # in a row; the first is not counted
PATIENCE = 60.0
MESSAGE, SHARD = 1, 2  # what a connection is for
_HEAD, _PART = struct.Struct("<BQQ"), struct.Struct("<QQ")


def take_all(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := connection.recv(min(1 << 20, size - len(data)))):
            raise EOFError
        data += more
    return bytes(data)


def serve() -> None:
    """Be the other host: take messages and shards until the end."""
    memory = host_memory.create()
    host_memory.reserve(memory, 0, MOST_SNAPSHOT)

    def serve_one(connection: socket.socket) -> None:
        what, size, chunk = _HEAD.unpack(take_all(connection, _HEAD.size))
        while what == MESSAGE:
            take_all(connection, size)
            connection.sendall(b"!")
        to = Window(memory, host_memory.data_place(0), size, chunk)
        digests = take_all(connection, 16 * -(-size // chunk))
        while True:
            first, count = _PART.unpack(take_all(connection, _PART.size))
            part = [digests[16 * one : 16 * one + 16] for one in range(first, first + count)]
            _memory_tier.receive(connection.fileno(), to.part(first, count), part, PATIENCE)

    def end_with_it(connection: socket.socket) -> None:
        with connection:
            try:
                serve_one(connection)
            except EOFError:
                return

    with socket.create_server((THERE, PORT)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=end_with_it, args=(connection,), daemon=True).start()


class Shard:
    """A snapshot in this host's memory, and the connection on which it goes."""

    def __init__(self, memory: int, size: int, chunk: int, at_a_time: int) -> None:
        """at_a_time: chunks that are all confirmed before the next ones go; 0: as the sender has it."""
        self._window = Window(memory, host_memory.data_place(0), size, chunk)
        self._digests = _memory_tier.digests(self._window)
        self._step = at_a_time or len(self._digests)
        self._connection = connect(SHARD, size, chunk)
        self._connection.sendall(b"".join(self._digests))

    def send(self, pace: Pace) -> None:
        for first in range(0, len(self._digests), self._step):
            part = self._digests[first : first + self._step]
            self._connection.sendall(_PART.pack(first, len(part)))
            window = self._window.part(first, len(part))
            _memory_tier.send(self._connection.fileno(), window, part, pace, PATIENCE)


def connect(what: int, size: int, chunk: int = 0) -> socket.socket:
    connection = socket.create_connection((THERE, PORT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HEAD.pack(what, size, chunk))
    return connection


class Training:
    """Plays minibatches, and says to the pace what ranks say."""

    def __init__(self, size: int) -> None:
        """size: of its snapshots."""
        self.memory = host_memory.create()
        host_memory.reserve(self.memory, 0, size)
        self.pace = Pace()
        words = [Window(self.memory, 0, PAGE, PAGE)]
        self.pace.listen(words, MINIBATCH, AWAITED, NETWORK_USED)
        self._messages = {size: connect(MESSAGE, size) for _, size in MINIBATCH_PARTS}
        self._data = bytes(max(size for _, size in MINIBATCH_PARTS))

    def minibatch(self, snapshot: Callable[[], None] | None, *, blocks: bool, tells: bool) -> Minibatch:
        """Return how long it took, and when it used the network. tells: when it does so, to the sender."""
        began = time.monotonic()
        host_memory.put_word(self.memory, MINIBATCH, int(began * 1e9))
        sending = threading.Thread(target=snapshot) if snapshot is not None else None
        if sending is not None:
            sending.start()
        if blocks and sending is not None:
            sending.join()
        used = []
        for seconds, size in MINIBATCH_PARTS:
            time.sleep(seconds)
            begin = time.monotonic() - began
            host_memory.put_word(self.memory, NETWORK_USED, int(tells))
            self._messages[size].sendall(memoryview(self._data)[:size])
            take_all(self._messages[size], 1)
            host_memory.put_word(self.memory, NETWORK_USED, 0)
            used.append((begin, time.monotonic() - began))
        if sending is not None:
            host_memory.put_word(self.memory, AWAITED, 1)
            sending.join()
            host_memory.put_word(self.memory, AWAITED, 0)
        return time.monotonic() - began, used


def train(rounds: int, size: int, bytes_per_second: float) -> dict[str, list[float]]:
    """Return the seconds of a minibatch in each round, by scheme."""
    training = Training(size)
    usual = Shard(
        training.memory, size, CHUNK_BYTES // 16, 0
    )  # buffers as small beside the snapshot as GEMINI's
    one_buffer = Shard(training.memory, size, BUFFERS * CHUNK_BYTES // 16, 1)
    profiled = [training.minibatch(None, blocks=False, tells=False) for _ in range(8)][1:]
    found = idle_time.idle(profiled)
    assert found is not None, profiled
    planned = idle_time.plan(found, size, 1, 0.0, bytes_per_second)
    assert planned is not None, found
    one_a_span = biggest_first(found, size, bytes_per_second)
    whole = max(part for _, _, part in one_a_span)
    largest = Shard(training.memory, size, min(64 << 20, -(-whole // 4096) * 4096), 1)

    def run(snapshot: Shard | None, slots: Sequence[tuple[float, float, int]] = (), **how: bool) -> float:
        training.pace.set_rate(float("inf"))
        training.pace.set_schedule(slots, found.seconds if slots else 0.0, bytes_per_second)
        send = None if snapshot is None else lambda: snapshot.send(training.pace)
        made = [
            training.minibatch(send, blocks=how.get("blocks", False), tells=how.get("tells", False))
            for _ in range(MINIBATCHES)
        ]
        return statistics.median(seconds for seconds, _ in made[1:])

    def at_rate(tells: bool) -> float:
        """At the constant rate, which may make way."""
        training.pace.set_schedule((), 0.0, 0.0)
        made = []
        for _ in range(MINIBATCHES):
            training.pace.set_rate(size / (0.8 * found.seconds), 0.1 * found.seconds)
            made.append(training.minibatch(lambda: usual.send(training.pace), blocks=False, tells=tells))
        return statistics.median(seconds for seconds, _ in made[1:])

    schemes: dict[str, Callable[[], float]] = {
        "baseline": lambda: run(None),
        "blocking": lambda: run(usual, blocks=True),
        "as fast as it goes": lambda: run(usual),
        "constant rate": lambda: at_rate(False),
        "constant rate, makes way": lambda: at_rate(True),
        "naive interleave": lambda: run(largest, one_a_span),
        "without pipeline": lambda: run(one_buffer, planned.slots),
        "interleaved": lambda: run(usual, planned.slots),
        "interleaved, makes way": lambda: run(usual, planned.slots, tells=True),
    }
    times: dict[str, list[float]] = {name: [] for name in schemes}
    for _ in range(rounds):
        for name, scheme in schemes.items():
            times[name].append(scheme())
    times["largest partition, MiB"] = [whole / 2**20]
    times["idle"] = [found.idle_seconds]
    return times


def biggest_first(found: Idle, left: int, bytes_per_second: float) -> list[tuple[float, float, int]]:
    """Return slots with one partition a span, the longest spans first, until all is in one."""
    slots = []
    for span in sorted(found.spans, key=lambda one: -one.length_seconds):
        size = min(left, int(0.9 * span.length_seconds * bytes_per_second))
        slots.append((span.start_seconds, span.start_seconds + 0.9 * span.length_seconds, size))
        left -= size
        if left == 0:
            break
    return sorted(slots)


def measured(rounds: int, mib: int, megabits: int) -> dict[str, list[float]]:
    with namespaces(2) as hosts, ExitStack() as stack:
        stack.enter_context(hosts.slowed(0, megabits * 1_000_000))
        script = [sys.executable, os.path.abspath(__file__)]
        other = subprocess.Popen([*hosts.on(1), *script, "--serve"], stdout=subprocess.PIPE, text=True)
        stack.callback(other.wait)
        stack.callback(other.kill)
        assert other.stdout is not None
        other.stdout.readline()
        command = [*hosts.on(0), *script, "--train"]
        command += ["--rounds", str(rounds), "--mib", str(mib), "--megabits", str(megabits)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, list[float]] = json.loads(done.stdout)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of all schemes, by turns (default 5)")
    parser.add_argument("--mib", type=int, default=8, help="size of a snapshot (default 8)")
    parser.add_argument("--megabits", type=int, default=160, help="a second, of the link (default 160)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args: Any = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.train:
        # A byte of payload takes 1.04 on the link: headers of Ethernet, IP and TCP.
        print(json.dumps(train(args.rounds, args.mib << 20, args.megabits * 1e6 / 8 / 1.04)))
        return
    times = measured(args.rounds, args.mib, args.megabits)
    if args.json:
        print(json.dumps(times))
        return
    idle, largest = times.pop("idle")[0], times.pop("largest partition, MiB")[0]
    for name, of_scheme in times.items():
        ratios = [one / base for one, base in zip(of_scheme, times["baseline"], strict=True)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name:26} {statistics.median(of_scheme):.3f} s, of the baseline {ratio}")
    print(f"idle {idle:.3f} s; the largest partition of the naive interleave {largest:.1f} MiB")


if __name__ == "__main__":
    main()
