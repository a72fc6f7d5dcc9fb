"""What parity costs and gives: XOR against a copy, host memory and bytes sent against copies, the decoding.

    python scripts/bench/memory_parity.py [--mib 96] [--runs 15] [--json]

XOR: a piece of 256 KiB, which has just come and is in the processor's cache, into a sum in memory; and pieces
that are in memory, too. Beside it memcpy of the same bytes, on the same core: ratios are medians of pairs.
Hosts: agents in this process on the loopback network, a rank each with a shard of `--mib`, over two steps. A
host's memory is what its memfds take; then it loses all, and gets the shard back.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from jitckpt.agent.memory_tier import MemoryTier
from jitckpt.agent.protection import MemoryProtection
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.events import EventLog
from jitckpt.hosts import connections
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.saves.layout import Identity
from jitckpt.tiers import chunks, host_memory, shard
from jitckpt.tiers.chunks import Sum, Window
from jitckpt.wire.agents import OF_MEMORY
from jitckpt.wire.hosts import Host

PIECE = 256 << 10
HERE = "127.0.0.1"
LIMIT = 600.0
STEPS = 3
WAYS = {"two copies": ("peer", 2, 4), "parity over 4": ("parity", 4, 4), "parity over 3": ("parity", 3, 3)}


def window_of(size: int) -> Window:
    descriptor = host_memory.create()
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().data
    host_memory.write(descriptor, data, host_memory.PAGE)
    window = Window(descriptor, host_memory.PAGE, size, PIECE)
    os.close(descriptor)
    return window


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def exclusive_or(size: int, runs: int) -> dict[str, float]:
    """Return bytes per second of memcpy and of both kinds of XOR, and their ratios to it."""
    to, source, target = window_of(size), window_of(size), window_of(size)
    data, hot = memoryview(source), memoryview(window_of(PIECE))
    copied = torch.frombuffer(memoryview(target), dtype=torch.uint8)
    from_ = torch.frombuffer(data, dtype=torch.uint8)
    count = size // PIECE
    sum_ = Sum()
    for number in range(count):
        sum_.add(0, number, data[number * PIECE : (number + 1) * PIECE], to)
    pieces = iter(range(1, 1 << 30))

    def add(part: Callable[[int], memoryview]) -> None:
        piece = next(pieces)
        for number in range(count):
            sum_.add(piece, number, part(number), to)

    torch.set_num_threads(1)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copied.copy_(from_),
        "XOR of what has come": lambda: add(lambda number: hot),
        "XOR of what is in memory": lambda: add(lambda number: data[number * PIECE : (number + 1) * PIECE]),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, call in ways.items():
            times[name].append(seconds(call))
    found = {name: size / statistics.median(of) for name, of in times.items()}
    for name in list(ways)[1:]:
        pairs = zip(times["memcpy"], times[name], strict=True)
        found[f"{name} / memcpy"] = statistics.median(copy / one for copy, one in pairs)
    return found


class Agent:
    """An agent with one of `count` ranks, each with a shard of so many bytes."""

    def __init__(self, job: str, wanted: Wanted, rank: int, count: int, size: int) -> None:
        self.tier = MemoryTier(wanted, job, EventLog())
        self.rank, self._count, self._size = rank, count, size
        self.hosts: Hosts | None = None
        self._protection: MemoryProtection | None = None

    def listen(self, known: Sequence[Host], listener: socket.socket) -> None:
        """Be one of these hosts, from now on."""
        self.end()
        self.hosts = Hosts(self.rank, known, listener, b"secret", 60.0)
        self.tier.answer_others(self.hosts)

    def connect(self) -> None:
        """Connect to all others, which listen."""
        assert self.hosts is not None
        self.hosts.connect(60.0)

    def protect(self) -> None:
        """Begin to send snapshots; all are connected."""
        assert self.hosts is not None
        given = {self.rank: self.tier.given(self.rank)}
        self._protection = MemoryProtection(self.tier, given, self.hosts, EventLog())

    def write(self, step: int, cut: shard.Cut | None) -> None:
        """Write a snapshot, as its rank does. cut: which part of the replicas' state it is."""
        descriptor, slot = self.tier.memory.of(self.rank), step % 2
        host_memory.unseal(descriptor, slot)
        data = torch.randint(0, 256, (self._size,), dtype=torch.uint8).numpy().data
        host_memory.write(descriptor, data, host_memory.data_place(slot))
        window = chunks.window(descriptor, host_memory.data_place(slot), self._size)
        checksums = [one.hex() for one in chunks.digests(window)]
        identity = Identity("job", "f", self._count, self.rank, self.rank, self._count)
        all_of_it = {"all": ("uint8", [self._size], 0)}
        index = shard.Index(identity, step, "a", 0.0, checksums, all_of_it, self._size, {}, cut).encode()
        host_memory.seal(descriptor, slot, index, shard.seal_of(index, step, self._size))
        host_memory.put_word(descriptor, host_memory.READY, 1)

    def turn(self) -> None:
        """Send and hear what there is."""
        assert self.hosts is not None
        assert self._protection is not None
        self._protection.look()
        for arrived in self.hosts.take():
            if isinstance(arrived, Arrived) and isinstance(arrived.message, OF_MEMORY):
                self._protection.hear(arrived.host, arrived.message)

    @property
    def is_protected(self) -> bool:
        return self._protection is not None

    @property
    def has_lost_hosts(self) -> bool:
        return self.hosts is not None and bool(self.hosts.lost)

    def has_safe(self, step: int) -> bool:
        assert self._protection is not None
        return self._protection.safe == step

    def lose(self) -> None:
        """Lose all that memory has."""
        self.tier.memory.close()
        if self.tier.parity is not None:
            self.tier.parity.parities.close()

    def get(self) -> None:
        """Get what its rank needs."""
        assert self.hosts is not None
        self.tier.gather(self.hosts)

    def memory(self) -> int:
        """Return the bytes that its memory takes."""
        parity = 0 if self.tier.parity is None else self.tier.parity.parities.taken()
        return self.tier.memory.taken() + parity

    def end(self) -> None:
        """Be no host any more; what is in memory stays."""
        if self._protection is not None:
            self._protection.stop()
        if self.hosts is not None:
            self.hosts.close()
        self._protection = self.hosts = None

    def close(self) -> None:
        self.end()
        self.tier.close(end=True)


class Agents:
    """So many agents in this process, each with one rank, whose shard has so many bytes."""

    def __init__(self, job: str, wanted: Wanted, count: int, size: int) -> None:
        self.all = [Agent(job, wanted, rank, count, size) for rank in range(count)]
        self._size = size
        self.meet()

    def meet(self) -> None:
        for agent in self.all:
            agent.end()
        listeners = [connections.listen(HERE) for _ in self.all]
        known = [Host(HERE, one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
        for agent, listener in zip(self.all, listeners, strict=True):
            agent.listen(known, listener)
        with ThreadPoolExecutor(len(self.all)) as pool:
            list(pool.map(Agent.connect, self.all))
        for agent in self.all:
            agent.protect()

    def make(self, step: int) -> None:
        """Have every rank make a snapshot, and wait until it is safe."""
        for agent in self.all:
            agent.write(step, self.cut(agent.rank))
        end = time.monotonic() + LIMIT
        while not all(agent.has_safe(step) for agent in self.all):
            if time.monotonic() > end:
                raise SystemExit(f"step {step} is not safe after {LIMIT:g} s")
            for agent in self.all:
                agent.turn()
            time.sleep(0.001)

    def cut(self, rank: int) -> shard.Cut | None:
        """Return which part of the replicas' state this rank's is; None: all of it."""
        return None

    def memory(self) -> float:
        """Return the bytes that a host's memory takes, the mean over the hosts."""
        return statistics.mean(agent.memory() for agent in self.all)

    def restored(self, lost: int = 1) -> float:
        """Take all from the last hosts; return the seconds in which all have what they need."""
        for agent in self.all[-lost:]:
            agent.lose()
        self.meet()
        with ThreadPoolExecutor(len(self.all)) as pool:
            took = seconds(lambda: list(pool.map(self.get, range(len(self.all)))))
        last = self.all[-1]
        host_memory.check(last.tier.memory.of(last.rank), STEPS)
        return took

    def get(self, host: int) -> None:
        """Have a host get what its rank needs."""
        self.all[host].get()

    def close(self) -> None:
        for agent in self.all:
            agent.end()
        for agent in self.all:
            agent.tier.close(end=True)


def sent() -> int:
    """Return the bytes that have gone over the loopback network since the machine began."""
    line = next(
        one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("lo:")
    )
    return int(line.split()[1])


def measured(way: str, size: int) -> dict[str, float]:
    """Return what a step takes, in shards, and the seconds until a lost host has its shard back."""
    mode, copies, count = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        agents = Agents(folder, Wanted(mode, copies, limit=1 << 40), count, size)
        try:
            for step in range(1, STEPS):
                agents.make(step)
            before = sent()
            agents.make(STEPS)
            step_bytes = sent() - before
            memory = agents.memory()
            return {
                "host memory": memory / size,
                "sent by a host": step_bytes / count / size,
                "seconds to restore": agents.restored(),
            }
        finally:
            agents.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=96, help="size of a shard (default 96)")
    parser.add_argument("--runs", type=int, default=15, help="how often XOR and copy are done (default 15)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size = args.mib << 20
    found = {"XOR": exclusive_or(size, args.runs)} | {way: measured(way, size) for way in WAYS}
    if args.json:
        print(json.dumps(found))
        return
    for name, rate in found.pop("XOR").items():
        told = f"{rate:6.2f}" if "/" in name else f"{rate / 1e9:6.2f} GB/s"
        print(f"{name:34} {told}")
    for way, numbers in found.items():
        print(f"{way:16}", ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
