"""The flush problem as a linear program for SciPy's HiGHS: an independent way to the least blocking time."""

import random
import sys

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]

from jitckpt.planning.flush import Flush, exact, supply_and_room
from jitckpt.planning.topology import GPU, STORE, Topology, TopologyLink, Vertex


def blocking_seconds(flush: Flush) -> float:
    """Least T with bytes on link e <= T x bandwidth(e), all supply gone and no room overfilled."""
    topology = flush.topology
    supply, room = supply_and_room(flush)
    scale = max(sum(supply), 1.0)  # HiGHS's tolerances are absolute
    rate_scale = max(link.bytes_per_second for link in topology.links)
    relays = [vertex.kind != GPU for vertex in topology.vertices]
    links = [
        link
        for link in topology.links
        if (supply[link.source] > 0 or relays[link.source]) and (room[link.target] > 0 or relays[link.target])
    ]
    count = len(links)
    cost = np.zeros(count + 1)
    cost[count] = 1
    upper, limits = [], []
    for index, link in enumerate(links):
        row = np.zeros(count + 1)
        row[index], row[count] = 1, -link.bytes_per_second / rate_scale
        upper.append(row)
        limits.append(0.0)
    equal, values = [], []
    for v in range(len(topology.vertices)):
        row = np.zeros(count + 1)
        for index, link in enumerate(links):
            row[index] += (link.target == v) - (link.source == v)
        if supply[v] > 0 or (relays[v] and room[v] == 0):
            equal.append(row)
            values.append(-supply[v] / scale)
            continue
        # What arrives, less what is passed on, stays: at least nothing, at most the room.
        upper.append(-row)
        limits.append(0.0)
        if room[v] < sum(supply):
            upper.append(row)
            limits.append(room[v] / scale)
    found = linprog(cost, np.array(upper), limits, np.array(equal), values, method="highs")
    assert found.status == 0, found.message
    return float(found.x[count]) * scale / rate_scale


def random_flush(topology: Topology, generator: random.Random) -> Flush:
    """Sizes so that some GPUs run over and others do not; one of them, to be sure."""
    count = len(topology.gpus)
    sizes = [generator.uniform(1e6, 200e6) for _ in range(count)]
    free = [generator.choice([0.0, 60e6, 120e6, generator.uniform(0, 200e6)]) for _ in range(count)]
    free[generator.randrange(count)] = 0.0
    return Flush(topology, tuple(sizes), tuple(free))


def random_topology(generator: random.Random) -> Topology:
    """Direct links, some missing, of any bandwidth; every GPU has a link to the host."""
    count = generator.randint(2, 12)
    links = [TopologyLink(gpu, count, generator.uniform(1e9, 30e9)) for gpu in range(count)]
    links += [
        TopologyLink(a, b, generator.uniform(1e9, 100e9))
        for a in range(count)
        for b in range(count)
        if a != b and generator.random() < 0.5
    ]
    return Topology((*(Vertex(f"GPU{i}") for i in range(count)), Vertex("host", STORE)), tuple(links))


def disagreement(seed: int) -> float:
    """Of one random topology and save: how far exact is from the linear program, relative to it."""
    generator = random.Random(seed)
    flush = random_flush(random_topology(generator), generator)
    expected = blocking_seconds(flush)
    return abs(exact(flush).blocking_seconds - expected) / expected


if __name__ == "__main__":
    instances = int(sys.argv[1])
    worst = max(disagreement(seed) for seed in range(instances))
    print(
        f"{instances} random instances: exact and the linear program differ by at most {worst:.2g} of the "
        "time"
    )
