"""How the run time of each planning algorithm grows: measured, printed and drawn.

    python scripts/bench/planning.py [--plot docs/pictures/planning-complexity.png] [--json FILE]

Times are of one core; the least of several runs. Under the table: the slowest of 100 random saves to
schedule, which is what training waits for.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jitckpt.decisions.placement import Machine, place, ring_placement
from jitckpt.decisions.traffic import Link, Span, schedule_traffic
from jitckpt.planning import exact, flush
from jitckpt.planning.cluster import EXAMPLE, Description, parse_description
from jitckpt.planning.counting import recovery_probability, surviving_losses
from jitckpt.planning.failures import exponential_failures
from jitckpt.planning.flush import Flush
from jitckpt.planning.pictures import draw_curves, new_figure, save_figure
from jitckpt.planning.plan import analyse
from jitckpt.planning.policies import parse_policy
from jitckpt.planning.simulator import simulate
from jitckpt.planning.topology import Topology, all_to_all, dgx1, nvswitch
from jitckpt.planning.traces import synthetic_trace


@dataclass(frozen=True)
class Growth:
    name: str
    over: str  # what grows
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Of the last doubling or so: seconds ~ size^exponent."""
        (a, b), (s, t) = self.sizes[-2:], self.seconds[-2:]
        return math.log(t / s) / math.log(b / a)


def measure(
    name: str, over: str, sizes: Sequence[int], make: Callable[[int], Callable[[], object]], runs: int = 5
) -> Growth:
    seconds = []
    for size in sizes:
        seconds.append(least_seconds(make(size), runs))
    return Growth(name, over, tuple(sizes), tuple(seconds))


def least_seconds(work: Callable[[], object], runs: int) -> float:
    best = math.inf
    for _ in range(runs):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def large_cluster(gpus: int) -> Description:
    """The example's machines, as many as it takes, with storage that grows along."""
    machines = gpus // 8
    text = EXAMPLE
    for old, new in (
        ("machines = 1\n", f"machines = {machines}\n"),
        ("machines_per_rack = 1", "machines_per_rack = 4"),
        ("spare_machines = 1", f"spare_machines = {1 + machines // 20}"),
        ("data = 4", f"data = {gpus // 2}"),
        ('storage_write = "5 GB/s"', f'storage_write = "{gpus} GB/s"'),
        ('storage_read = "10 GB/s"', f'storage_read = "{2 * gpus} GB/s"'),
    ):
        text = text.replace(old, new, 1)
    return parse_description(text, "the benchmark's cluster")


def played(days: float, policy: str) -> Callable[[int], Callable[[], object]]:
    def make(gpus: int) -> Callable[[], object]:
        description = large_cluster(gpus)
        parsed = parse_policy(policy, description)
        per_save = analyse(description, parsed).minibatches_per_save

        def work() -> object:
            failures = exponential_failures(description, seed=1)
            return simulate(description, parsed, failures, days=days, minibatches_per_save=per_save)

        return work

    return make


def scheduled(topology: Callable[[int], Topology]) -> Callable[[int], Callable[[], object]]:
    """The native scheduler and its binding, with sizes as in COLLAB's Figure 10."""

    def make(gpus: int) -> Callable[[], object]:
        problem = Flush(topology(gpus), synthetic_trace(gpus, 1, seed=gpus)[0], (160e6,) * gpus)
        supply, room = flush.supply_and_room(problem)
        network = problem.topology.compiled
        return lambda: network.fastest(supply, room)

    return make


def by(way: Callable[[Flush], object]) -> Callable[[int], Callable[[], object]]:
    def make(gpus: int) -> Callable[[], object]:
        problem = Flush(all_to_all(gpus), synthetic_trace(gpus, 1, seed=gpus)[0], (160e6,) * gpus)
        return lambda: way(problem)

    return make


def slowest_flush(topology: Topology, saves: int = 100) -> tuple[float, float]:
    """Of random saves: the longest that the native scheduler takes, and with the Python around it."""
    gpus = len(topology.gpus)
    native, whole = 0.0, 0.0
    free = (80e6, 128e6, 160e6)  # half, some or few of the GPUs run over
    for index, sizes in enumerate(synthetic_trace(gpus, saves, seed=gpus)):
        problem = Flush(topology, sizes, (free[index % len(free)],) * gpus)
        supply, room = flush.supply_and_room(problem)
        native = max(native, least_seconds(partial(topology.compiled.fastest, supply, room), 20))
        whole = max(whole, least_seconds(partial(flush.exact, problem), 20))
    return native, whole


def traffic(spans: int) -> Callable[[], object]:
    generator = random.Random(1)
    idle = [Span(float(i), generator.uniform(0.1, 0.9)) for i in range(spans)]
    link = Link(50e9, 20e-6, 50e9)
    return lambda: schedule_traffic(idle, 0.4 * spans * 50e9, 2, link)


def job(minibatches: int) -> Callable[[], object]:
    kinds = [exact.FailureKind("crash", 1e-5, 300.0, True), exact.FailureKind("link", 2e-5, 60.0, False)]
    return lambda: exact.best_schedule(minibatches, 2.0, 20.0, kinds)


def counted(replicas: int, strategy: str) -> Callable[[int], Callable[[], object]]:
    return lambda machines: lambda: recovery_probability(machines, replicas, machines // 4, strategy)


def placed(machines: int) -> Callable[[], object]:
    racks = [Machine((f"switch-{i // 32}", f"rack-{i // 4}"), 1e12) for i in range(machines)]
    return lambda: place(racks, 2, 1e11)


def unequal(machines: int) -> list[Machine]:
    """Power feeds that cross switches; every fourth machine has no room for others."""
    return [
        Machine((f"feed-{i // 60}", f"switch-{i // 48}", f"rack-{i // 4}"), 2e11 * (1 + i % 4))
        for i in range(machines)
    ]


def placed_by_room(machines: int) -> Callable[[], object]:
    return lambda: place(unequal(machines), 2, 1e11)


def counted_pairs(machines: int) -> Callable[[], object]:
    holders = place(unequal(machines), 2, 1e11).holders
    return lambda: surviving_losses(holders, machines, min(machines, 100))


def all_growth() -> list[Growth]:
    powers = (8, 16, 32, 64, 128)
    thousands = (100, 1000, 10_000)
    clusters = (96, 992, 9984, 100_000)
    return [
        measure("flush, exact, all to all", "GPUs", powers, scheduled(all_to_all), runs=20),
        measure("flush, exact, one switch", "GPUs", powers, scheduled(nvswitch), runs=20),
        measure("flush, exact, with Python", "GPUs", powers, by(flush.exact), runs=20),
        measure("flush, exact, reference", "GPUs", powers, by(flush.exact_reference)),
        measure("flush, greedy", "GPUs", powers, by(flush.greedy)),
        measure("flush, by units of 1 MB", "GPUs", (8, 16, 32), by(flush.min_time_max_flow), runs=3),
        measure("recovery probability, groups", "machines", thousands, counted(2, "group")),
        measure("recovery probability, ring", "machines", thousands, counted(3, "ring")),
        measure(
            "recovery probability, any", "machines", (25, 50, 100, 200, 400),
            lambda n: lambda: surviving_losses(ring_placement(n, 3).holders, n), runs=2,
        ),
        measure("recovery probability, pairs", "machines", (96, 960, 9600), counted_pairs, runs=2),
        measure("placement", "machines", (96, 992, 9984), placed, runs=2),
        measure("placement, unequal memory", "machines", (96, 960, 9600), placed_by_room, runs=2),
        measure("traffic", "spans", (10, 100, 1000), traffic, runs=2),
        measure("best schedule of a job", "minibatches", (1000, 100_000, 10_000_000), job, runs=2),
        measure("90 days, transparent JIT", "GPUs", clusters, played(90, "transparent-jit+periodic"), runs=3),
        measure("90 days, GEMINI", "GPUs", clusters, played(90, "gemini+periodic"), runs=3),
    ]  # fmt: skip


def draw(growth: Sequence[Growth], path: Path) -> None:
    figure, first = new_figure(12.0, 7.0)
    first.remove()
    flushes = [one for one in growth if one.name.startswith("flush")]
    others = [one for one in growth if one not in flushes]
    for axes, shown_here in zip(figure.subplots(1, 2), (flushes, others), strict=True):
        draw_curves(axes, [(f"{one.name} ({one.over})", one.sizes, one.seconds) for one in shown_here])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("size")
        axes.set_ylabel("seconds on one core")
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, help="draw the times")
    parser.add_argument("--json", type=Path, help="write the times")
    parsed = parser.parse_args()
    growth = all_growth()
    table = Table("algorithm", "over", "seconds at size", "grows as")
    for one in growth:
        shown = ", ".join(
            f"{size}: {seconds:.3g}" for size, seconds in zip(one.sizes, one.seconds, strict=True)
        )
        table.add_row(one.name, one.over, shown, f"size^{one.exponent:.1f}")
    Console(width=160).print(table)
    for name, topology in (("8 GPUs of a DGX-1", dgx1()), ("128 GPUs, all to all", all_to_all(128))):
        native, whole = slowest_flush(topology)
        print(f"{name}: {1e6 * native:.1f} us, with Python {1e6 * whole:.0f} us")
    if parsed.json:
        parsed.json.write_text(json.dumps([asdict(one) for one in growth], indent=1) + "\n")
    if parsed.plot:
        draw(growth, parsed.plot)


if __name__ == "__main__":
    main()
