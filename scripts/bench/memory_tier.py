"""What the memory tier costs, and how fast it gives back what is lost.

    jitckpt exec --device softgpu -- python scripts/bench/memory_tier.py [--mib 256] [--pairs 5] [--json]

Bytes: xxh3 of chunks against a copy by memcpy; a shard that is put into another host's memory (an agent in a
process of its own, on the loopback network) against the same bytes by raw TCP, and had back from there. All
are medians of so many pairs, one of each after the other. Decision: for 1,000 ranks. Step: a training under
FSDP2 full shard on two ranks, in windows with and without snapshots by turns, in the running job.
"""

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import xxhash

from jitckpt.decisions.sources import Kind, Source, decide
from jitckpt.hosts import connections
from jitckpt.hosts.connections import Host, Hosts
from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, peers, shard
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.peers import PeerMemory

HERE = "127.0.0.1"
IDENTITY = Identity("job", "f", 2, 0, 0, 2)
WINDOWS, WINDOW = 12, 20  # of steps
TRAINING = Path(__file__).parent / "memory_tier_training.py"


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def filled(size: int) -> HostMemory:
    """Return memory with one shard of rank 0 after step 1."""
    memory = HostMemory()
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().data
    host_memory.write(memory.of(0), data, host_memory.data_place(1))
    places, begin = [], 0
    for count in shard.chunk_sizes(size):
        places.append(xxhash.xxh3_128_hexdigest(data[begin : begin + count]))
        begin += count
    index = shard.Index(IDENTITY, 1, "a", 0.0, places, {"all": ("uint8", [size], 0)}, size, {}).encode()
    host_memory.seal(memory.of(0), 1, index, shard.seal_of(index, 1, size))
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


def send_raw(port: int, data: bytes) -> None:
    with socket.create_connection((HERE, port)) as connection:
        connection.sendall(data)
        connection.recv(1)


def bytes_moved(size: int, pairs: int) -> dict[str, float]:
    """Return bytes per second of each way."""
    memory = filled(size)
    listeners = [connections.listen(HERE) for _ in range(2)]
    known = [Host(HERE, one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    other = multiprocessing.get_context("fork").Process(
        target=other_host, args=(listeners[1], known, size, theirs)
    )
    other.start()
    listeners[1].close()
    hosts = Hosts(0, known, listeners[0], b"secret", 60.0)
    port = ours.recv()
    hosts.connect(60.0)
    peer, again = PeerMemory(hosts, 1), HostMemory()
    data = os.urandom(size)
    target = bytearray(size)
    found: dict[str, list[float]] = {name: [] for name in ("copy", "xxh3", "raw TCP", "put", "get")}
    for _ in range(pairs):
        found["copy"].append(seconds(lambda: memoryview(target).__setitem__(slice(None), data)))
        found["xxh3"].append(seconds(lambda: hashed(data)))
        found["raw TCP"].append(seconds(lambda: send_raw(port, data)))
        found["put"].append(seconds(lambda: peer.put(memory.get(0, 1, "a"))))
        found["get"].append(seconds(lambda: again.put(peer.get(0, 1, "a"))))
    ours.send(None)
    hosts.close()
    other.join()
    memory.close()
    again.close()
    return {name: size / statistics.median(times) for name, times in found.items()}


def hashed(data: bytes) -> None:
    for begin in range(0, len(data), shard.CHUNK):
        xxhash.xxh3_128_digest(memoryview(data)[begin : begin + shard.CHUNK])


def decision(ranks: int = 1000, hosts: int = 125) -> float:
    """Return the seconds that a decision takes, with a host lost and a damaged copy."""
    found = [
        Source(rank, step, kind, "a", (rank + kind) % hosts, 1 << 30)
        for rank in range(ranks)
        for step in (41, 42)
        for kind in (Kind.OWN_MEMORY, Kind.PEER_MEMORY)
        if (rank + kind) % hosts != 7
    ]
    return min(seconds(lambda: decide(range(ranks), found, found[:1])) for _ in range(5))


def step_ratio() -> dict[str, float]:
    """Return the median time of a step with the tier and without, and their ratio, in one running job."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["jitckpt", "run", "--standalone", "--nproc-per-node", "2", "--device", "softgpu"]
        run += ["--warm-spares", "0", "--no-self-check", "--checkpoint-dir", folder, "--memory-tier", "peer"]
        done = subprocess.run(
            [*run, str(TRAINING), str(WINDOWS), str(WINDOW)], capture_output=True, text=True, check=False
        )
    told = re.search(r"^windows (.*)$", done.stdout, re.MULTILINE)
    if told is None:
        raise SystemExit(done.stderr)
    windows: list[float] = json.loads(told[1])
    with_tier, without = windows[::2], windows[1::2]
    ratios = [one / two for one, two in zip(with_tier, without, strict=True)]
    return {
        "with": statistics.median(with_tier),
        "without": statistics.median(without),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of a shard (default 256)")
    parser.add_argument("--pairs", type=int, default=5, help="how often each is done (default 5)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    moved = bytes_moved(args.mib << 20, args.pairs)
    decided, step = decision(), step_ratio()
    if args.json:
        print(json.dumps({"bytes_per_second": moved, "decision_seconds": decided, "step": step}))
        return
    for name, rate in moved.items():
        print(f"{name:8} {rate / 1e9:6.2f} GB/s")
    put, hashing = moved["put"] / moved["raw TCP"], moved["xxh3"] / moved["copy"]
    get = moved["get"] / moved["raw TCP"]
    print(f"put / raw TCP {put:.2f}, get / raw TCP {get:.2f}, xxh3 / copy {hashing:.2f}")
    print(f"decision for 1,000 ranks  {1e3 * decided:.1f} ms")
    print(
        f"step {1e3 * step['with']:.2f} ms with, {1e3 * step['without']:.2f} ms without: {step['ratio']:.4f} "
        f"(medians of {WINDOWS // 2} pairs of windows of {WINDOW} steps)"
    )


if __name__ == "__main__":
    main()
