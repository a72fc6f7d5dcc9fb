"""In how many seconds a lost shard is back from one, two and three hosts that have it.

    sudo python scripts/bench/memory_holders.py [--mib 256] [--runs 5] [--megabits 400] [--json]

Each host is a network namespace of this machine with an agent's memory in a process of its own; this process
is the host that has lost the shard. Once as fast as the machine goes, and once with what each holder sends
limited to so many Mbit/s, as by its network card. Medians; the ways go by turns.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import torch
from memory_transfer import filled

from jitckpt.decisions.sources import Kind, Source
from jitckpt.hosts.connections import Hosts
from jitckpt.rehearsal.namespaces import namespaces
from jitckpt.tiers import from_holders, host_memory, peers
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.peers import PeerMemory
from jitckpt.wire.hosts import Host

HOLDERS = 3
PORT = 29511
SECRET = b"secret"


def everybody() -> list[Host]:
    """Return the host that has lost the shard, and its holders."""
    return [Host(f"10.79.0.{host + 1}", PORT, (host,), 0) for host in range(HOLDERS + 1)]


def met(index: int) -> Hosts:
    listener = socket.create_server((everybody()[index].address, PORT))
    return Hosts(index, everybody(), listener, SECRET, 60.0)


def hold(index: int, size: int) -> None:
    """Be a holder until standard input ends."""
    torch.manual_seed(0)  # all have the same
    hosts, memory = met(index), filled(size)
    hosts.answers[peers.VISIT] = partial(peers.serve, memory, lambda rank: None)
    print("ready", flush=True)
    hosts.connect(60.0)
    sys.stdin.read()
    hosts.close()


def get(size: int, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run, by how many holders there were."""
    hosts = met(0)
    hosts.connect(60.0)
    memory = HostMemory()
    found: dict[str, list[float]] = {str(count): [] for count in range(1, HOLDERS + 1)}
    for _ in range(runs + 1):
        for count, times in found.items():
            holders = holders_of(hosts, int(count), size)
            host_memory.unseal(memory.of(0), 1)
            began = time.perf_counter()
            from_holders.get(holders, "a", memory)
            times.append(time.perf_counter() - began)
    host_memory.check(memory.of(0), 1)
    hosts.close()
    memory.close()
    return {count: times[1:] for count, times in found.items()}  # the first ones have made the memory


def holders_of(hosts: Hosts, count: int, size: int) -> Mapping[Source, PeerMemory]:
    sources = [Source(0, 1, Kind.PEER_MEMORY, "a", host, size) for host in range(1, count + 1)]
    return {one: PeerMemory(hosts, one.host) for one in sources}


def measured(size: int, runs: int, bits_per_second: int | None) -> dict[str, float]:
    """Return the median seconds of each way; this process is on no host, so another one measures."""
    with namespaces(HOLDERS + 1) as hosts, ExitStack() as stack:
        if bits_per_second is not None:
            for host in range(1, HOLDERS + 1):
                stack.enter_context(hosts.slowed(host, bits_per_second))
        holding = [
            stack.enter_context(_start([*hosts.on(host), *_this("--hold", host, size)]))
            for host in range(1, HOLDERS + 1)
        ]
        try:
            for one in holding:
                assert one.stdout is not None
                if one.stdout.readline() != "ready\n":
                    raise SystemExit("a holder has failed")
            getting = stack.enter_context(_start([*hosts.on(0), *_this("--get", runs, size)]))
            told, _ = getting.communicate()
        finally:
            for one in holding:
                assert one.stdin is not None
                one.stdin.close()
    return {count: statistics.median(times) for count, times in json.loads(told).items()}


def _this(*arguments: object) -> list[str]:
    return [sys.executable, __file__, *map(str, arguments)]


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the shard (default 256)")
    parser.add_argument("--runs", type=int, default=5, help="how often each is done (default 5)")
    parser.add_argument("--megabits", type=int, default=400, help="a second, of each holder (default 400)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hold", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--get", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold:
        hold(*args.hold)
        return
    if args.get:
        runs, size = args.get
        print(json.dumps(get(size, runs)))
        return
    size = args.mib << 20
    found = {
        "as fast as it goes": measured(size, args.runs, None),
        f"{args.megabits} Mbit/s each": measured(size, args.runs, args.megabits * 1_000_000),
    }
    if args.json:
        print(json.dumps(found))
        return
    for way, seconds in found.items():
        told = ", ".join(f"from {count}: {one:.2f} s" for count, one in seconds.items())
        print(f"{way:20} {told}")


if __name__ == "__main__":
    main()
