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
import statistics
import tempfile
import time
from collections.abc import Callable
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


class Agents:
    """So many agents in this process, each with one rank, whose shard has so many bytes."""

    def __init__(self, job: str, wanted: Wanted, count: int, size: int) -> None:
        self.tiers = [MemoryTier(wanted, job, EventLog()) for _ in range(count)]
        self._size = size
        self._hosts: list[Hosts] = []
        self._protections: list[MemoryProtection] = []
        self.meet()

    def meet(self) -> None:
        self._end()
        listeners = [connections.listen(HERE) for _ in self.tiers]
        known = [Host(HERE, one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
        self._hosts = [Hosts(i, known, one, b"secret", 60.0) for i, one in enumerate(listeners)]
        for tier, met in zip(self.tiers, self._hosts, strict=True):
            tier.answer_others(met)
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            list(pool.map(lambda met: met.connect(60.0), self._hosts))
        self._protections = [
            MemoryProtection(tier, {rank: tier.given(rank)}, met, EventLog())
            for rank, (tier, met) in enumerate(zip(self.tiers, self._hosts, strict=True))
        ]

    def make(self, step: int) -> None:
        """Have every rank make a snapshot, and wait until it is safe."""
        for rank, tier in enumerate(self.tiers):
            descriptor, slot = tier.memory.of(rank), step % 2
            host_memory.unseal(descriptor, slot)
            data = torch.randint(0, 256, (self._size,), dtype=torch.uint8).numpy().data
            host_memory.write(descriptor, data, host_memory.data_place(slot))
            window = chunks.window(descriptor, host_memory.data_place(slot), self._size)
            checksums = [one.hex() for one in chunks.digests(window)]
            identity = Identity("job", "f", len(self.tiers), rank, rank, len(self.tiers))
            all_of_it = {"all": ("uint8", [self._size], 0)}
            cut = self.cut(rank)
            index = shard.Index(identity, step, "a", 0.0, checksums, all_of_it, self._size, {}, cut).encode()
            host_memory.seal(descriptor, slot, index, shard.seal_of(index, step, self._size))
            host_memory.put_word(descriptor, host_memory.READY, 1)
        end = time.monotonic() + LIMIT
        while any(one.safe != step for one in self._protections):
            if time.monotonic() > end:
                raise SystemExit(f"step {step} is not safe after {LIMIT:g} s")
            for met, protection in zip(self._hosts, self._protections, strict=True):
                protection.look()
                for arrived in met.take():
                    if isinstance(arrived, Arrived) and isinstance(arrived.message, OF_MEMORY):
                        protection.hear(arrived.host, arrived.message)
            time.sleep(0.001)

    def cut(self, rank: int) -> shard.Cut | None:
        """Return which part of the replicas' state this rank's is; None: all of it."""
        return None

    def memory(self) -> float:
        """Return the bytes that a host's memory takes, the mean over the hosts."""
        parities = [tier.parity.parities.taken() for tier in self.tiers if tier.parity is not None]
        return (sum(tier.memory.taken() for tier in self.tiers) + sum(parities)) / len(self.tiers)

    def restored(self, lost: int = 1) -> float:
        """Take all from the last hosts; return the seconds in which all have what they need."""
        for tier in self.tiers[-lost:]:
            tier.memory.close()
            if tier.parity is not None:
                tier.parity.parities.close()
        self.meet()
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            took = seconds(lambda: list(pool.map(self.get, range(len(self.tiers)))))
        host_memory.check(self.tiers[-1].memory.of(len(self.tiers) - 1), STEPS)
        return took

    def get(self, host: int) -> None:
        """Have a host get what its rank needs."""
        self.tiers[host].gather(self._hosts[host])

    def close(self) -> None:
        self._end()
        for tier in self.tiers:
            tier.close(end=True)

    def _end(self) -> None:
        for protection in self._protections:
            protection.stop()
        for met in self._hosts:
            met.close()


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
