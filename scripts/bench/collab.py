"""COLLAB's replays with real bytes: how long 8 agents are blocked until what is over has a place.

    python scripts/bench/collab.py [--slower 1000] [--json]

Each agent is a process with the memory tier's senders and stores of parts, on the loopback network; a ninth
has the paper's host memory. A link carries what a DGX-1's does (24 or 48 GB/s from one to another, 12 GB/s
to the host), so many times slower: with 1000 the paper's milliseconds are seconds. What does not fit an
agent's free memory goes as baseline, greedy and flow have it, in chunks of 4 MiB over all links at once. The
blocking time is that of the last link, until all bytes are written and checked there; beside it stands what
the bandwidths alone say. Settings: the example of the paper's Figure 1; of Figures 6, 7 and 10 (there with 8
agents that are all linked) the snapshot in which greedy is worst.
"""

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import torch

from jitckpt._memory_tier import Pace
from jitckpt.decisions import flush as decided
from jitckpt.hosts import connections
from jitckpt.hosts.connections import Hosts
from jitckpt.planning import flush
from jitckpt.planning.flush import Flush
from jitckpt.planning.topology import Topology, all_to_all, dgx1
from jitckpt.planning.traces import Trace, seismic_trace, synthetic_trace
from jitckpt.saves.layout import Identity
from jitckpt.tiers import chunks, host_memory, part_peers, parts, peers, shard
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.part_peers import PeerParts
from jitckpt.tiers.part_store import PartStore
from jitckpt.wire import visits
from jitckpt.wire.hosts import Host

AGENTS = 8  # and the host
HERE = "127.0.0.1"
SECONDS = 600.0
MB = 1e6
PLENTY = 1 << 40

Link = tuple[int, int, int, float]  # to whom, the first chunk, how many, and bytes per second
Amounts = dict[tuple[int, int], int]  # chunks, from whom to whom


def filled(rank: int, size: int) -> HostMemory:
    """Return memory with a shard of a rank after step 1."""
    memory = HostMemory()
    descriptor = memory.of(rank)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().data
    host_memory.write(descriptor, data, host_memory.data_place(1))
    window = chunks.window(descriptor, host_memory.data_place(1), size)
    checksums = [one.hex() for one in chunks.digests(window)]
    identity = Identity("job", "f", AGENTS, rank, rank, AGENTS)
    all_of_it = {"all": ("uint8", [size], 0)}
    index = shard.Index(identity, 1, "a", 0.0, checksums, all_of_it, size, {}).encode()
    host_memory.seal(descriptor, 1, index, shard.seal_of(index, 1, size))
    return memory


def agent(number: int, listener: socket.socket, known: Sequence[Host], size: int, orders: Connection) -> None:
    """An agent's process: sends over the links that it is given, or forgets what it has, and answers."""
    memory = filled(number, size) if number < AGENTS else HostMemory()
    store = PartStore({}, host_memory.create, lambda: PLENTY, "memory")

    async def more(request: visits.OfMemory, connection: peers.Connection) -> bool:
        return await part_peers.answer(
            (store, None), lambda rank: None, lambda rank, in_directory: None, request, connection
        )

    hosts = Hosts(number, known, listener, b"secret", SECONDS)
    hosts.answers[peers.VISIT] = partial(peers.serve, memory, lambda rank: None, more=more)
    hosts.connect(SECONDS)
    orders.send("ready")
    while (links := orders.recv()) is not None:
        orders.send(send(hosts, memory, number, links) if links else store.keep_within(0))
    hosts.close()
    store.close()
    memory.close()


def send(hosts: Hosts, memory: HostMemory, number: int, links: Sequence[Link]) -> float:
    """Return when the last part was whole where it belongs."""
    one = memory.shard(number, 1, "a")

    def put(link: Link) -> None:
        to, first, count, rate = link
        pace = Pace()
        pace.set_rate(rate)
        piece = parts.part_of(one, first, count)
        PeerParts(hosts, to, SECONDS, pace=pace).put_part(piece, in_directory=False)

    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(put, links))
    return time.monotonic()


class Agents:
    """sizes: bytes that each has to send at most."""

    def __init__(self, sizes: Sequence[int]) -> None:
        fork = multiprocessing.get_context("fork")
        listeners = [connections.listen(HERE) for _ in range(AGENTS + 1)]
        known = [Host(HERE, one.getsockname()[1], (i,), 0) for i, one in enumerate(listeners)]
        self._orders, self._processes = [], []
        for number, listener in enumerate(listeners):
            ours, theirs = fork.Pipe()
            size = sizes[number] if number < AGENTS else 0
            process = fork.Process(target=agent, args=(number, listener, known, size, theirs), daemon=True)
            process.start()
            self._orders.append(ours)
            self._processes.append(process)
        for one in listeners:
            one.close()
        for orders in self._orders:
            orders.recv()

    def blocked(self, amounts: Amounts, rate_of: Callable[[int, int], float]) -> float:
        """Have all send at once; return the seconds until all is where it belongs."""
        links: dict[int, list[Link]] = {}
        sent: dict[int, int] = {}
        for (source, target), count in amounts.items():
            first = sent.get(source, 0)
            links.setdefault(source, []).append((target, first, count, rate_of(source, target)))
            sent[source] = first + count
        begun = time.monotonic()
        for source, of in links.items():
            self._orders[source].send(of)
        ended: float = max(self._orders[source].recv() for source in links)
        for orders in self._orders:
            orders.send([])
        for orders in self._orders:
            orders.recv()
        return ended - begun

    def close(self) -> None:
        for orders in self._orders:
            orders.send(None)
        for process in self._processes:
            process.join()


def amounts_of(problem: Flush) -> dict[str, Amounts]:
    """Return what goes where by each way, in chunks."""
    topology = problem.topology
    over = [-(-int(size) // shard.CHUNK) for size in problem.remainder_bytes]
    spare = [int(size) // shard.CHUNK for size in problem.spare_bytes]
    rates = {ends: rate / shard.CHUNK for ends, rate in topology.bandwidth.items()}
    to_host = {(one, AGENTS): count for one, count in enumerate(over) if count}
    between = {ends: rate for ends, rate in rates.items() if ends[1] != AGENTS}
    greedy, left = decided.greedy(
        {one: count for one, count in enumerate(over) if count}, dict(enumerate(spare)), between
    )
    supply, room = [*over, 0], [*spare, sum(over)]
    links = [decided.MeasuredLink(*ends, rate) for ends, rate in rates.items()]
    least, _ = decided.soonest(supply, room, links)
    flow = decided.in_units(supply, room, links, least)
    return {
        "baseline": to_host,
        "greedy": {ends: int(count) for ends, count in greedy.items()}
        | {(one, AGENTS): int(count) for one, count in left.items()},
        "flow": {(link.source, link.target): count for link, count in flow},
    }


def worst(topology: Topology, trace: Trace, free: float) -> Flush:
    """Return the snapshot in which greedy takes longest, over the optimum."""
    problems = [Flush(topology, sizes, (free,) * AGENTS) for sizes in trace]
    problems = [one for one in problems if sum(one.remainder_bytes) > shard.CHUNK * AGENTS]

    def over(problem: Flush) -> float:
        return flush.greedy(problem).blocking_seconds / flush.exact(problem).blocking_seconds

    return max(problems, key=over)


def settings() -> dict[str, Flush]:
    over, free = [0.0] * AGENTS, [0.0] * AGENTS
    over[0], over[6], free[4], free[1] = 480 * MB, 240 * MB, 480 * MB, 240 * MB
    found = {"Figure 1": Flush(dgx1(), tuple(over), tuple(free))}
    seismic, synthetic = seismic_trace(AGENTS, 1, alike=4), synthetic_trace(AGENTS, 776, seed=1)
    for free_mb in (80, 128, 160):
        found[f"Figure 6, {free_mb} MB free"] = worst(dgx1(), seismic, free_mb * MB)
    for free_mb in (80, 128, 160):
        found[f"Figure 7, {free_mb} MB free"] = worst(dgx1(), synthetic, free_mb * MB)
    of_10 = synthetic_trace(AGENTS, 9, seed=AGENTS)
    found["Figure 10, all to all"] = worst(all_to_all(AGENTS), of_10, 160 * MB)
    return found


def measured(slower: float) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by setting and way, the seconds of blocking, and those that the bandwidths say."""
    problems = settings()
    sizes = [
        max(-(-int(one.remainder_bytes[number]) // shard.CHUNK) for one in problems.values()) * shard.CHUNK
        for number in range(AGENTS)
    ]
    agents = Agents(sizes)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, problem in problems.items():
        rates = {ends: rate / slower for ends, rate in problem.topology.bandwidth.items()}
        found[name] = {}
        for way, amounts in amounts_of(problem).items():
            said = max(count * shard.CHUNK / rates[ends] for ends, count in amounts.items())
            seconds = agents.blocked(amounts, lambda source, target: rates[source, target])  # noqa: B023
            found[name][way] = {"measured": seconds, "by bandwidth": said}
    agents.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slower", type=float, default=1000.0, help="how many times (default 1000)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measured(args.slower)
    if args.json:
        print(json.dumps(found))
        return
    for name, ways in found.items():
        best = ways["flow"]
        told = [
            f"{way} {one['measured']:.2f} s, {one['measured'] / best['measured']:.2f} times "
            f"({one['by bandwidth']:.2f} s, {one['by bandwidth'] / best['by bandwidth']:.2f})"
            for way, one in ways.items()
        ]
        print(f"{name:22}", "; ".join(told), flush=True)


if __name__ == "__main__":
    main()
