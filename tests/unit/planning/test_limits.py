"""Every formula at its limits, and by dimension: a table of formula, limit, what it gives there.

N machines or GPUs, m replicas, k lost at once; f a failure rate, o a save, r a recovery, t a minibatch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import pytest
from descriptions import describe, failure, large
from several_nodes import several_nodes

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.placement import Machine, mixed_placement, place, ring_placement
from jitckpt.decisions.traffic import Link, Span, schedule_traffic
from jitckpt.planning import cost, counting, exact, redundancy, survival
from jitckpt.planning.failures import exponential_failures
from jitckpt.planning.flush import Flush, FlushSchedule, baseline, greedy, min_time_max_flow
from jitckpt.planning.flush import exact as exact_flush
from jitckpt.planning.plan import analyse
from jitckpt.planning.policies import parse_policy
from jitckpt.planning.simulator import simulate
from jitckpt.planning.topology import STORE, Topology, TopologyLink, Vertex, dgx1

DAY = 86400.0
JOB = cost.JobCosts(100, 1e-2, 20.0, 50.0, 4.0, 0.001)
RATE = 100 * 1e-2 / DAY  # of the whole job
ALONE, CALM = replace(JOB, gpus=1), replace(JOB, failures_per_gpu_day=0.0)
FREE_SAVES, INSTANT = replace(JOB, save_seconds=0.0), replace(JOB, minibatch_seconds=0.0)
NODE = survival.Weibull(100.0, 1.3)
SPANS = [Span(0.0, 5.0, 0.1), Span(9.0, 3.0, 0.2)]
LINK = Link(100.0, 0.1, 50.0, 80.0, 4)


def kind(rate: float, outage: float = 30.0, *, rolls_back: bool = True) -> exact.FailureKind:
    return exact.FailureKind("crash", rate, outage, rolls_back)


def recovery(machines: int, replicas: int, lost: int, strategy: str) -> Fraction:
    return counting.recovery_probability(machines, replicas, lost, strategy)


def waste(way: Callable[[cost.JobCosts], cost.Waste], job: cost.JobCosts) -> float:
    return way(job).per_useful_second


def one_gpu(to_host: float, capacity: float = math.inf) -> Topology:
    return Topology((Vertex("GPU0"), Vertex("host", STORE, capacity)), (TopologyLink(0, 1, to_host),))


def chunks(size: float, replicas: int, link: Link = LINK) -> int:
    return len(schedule_traffic(SPANS, size, replicas, link).chunks)


def nothing_over(way: Callable[[Flush], FlushSchedule]) -> float:
    return way(Flush(dgx1(), (0.0,) * 8, (0.0,) * 8)).blocking_seconds


def host_memory(way: Callable[[float, int], redundancy.Costs], stage_bytes: float) -> float:
    return way(stage_bytes, 7).host_memory_bytes()


@dataclass(frozen=True)
class Limit:
    formula: str
    limit: str
    ours: Callable[[], object]
    expected: object


LIMITS = [
    Limit("c*", "N = 1", lambda: cost.optimal_saves_per_second(ALONE), math.sqrt(1e-2 / DAY / 40)),
    Limit("c*", "f = 0", lambda: cost.optimal_saves_per_second(CALM), 0.0),
    Limit("c*", "o = 0", lambda: cost.optimal_saves_per_second(FREE_SAVES), math.inf),
    Limit("periodic", "f = 0", lambda: waste(cost.periodic_waste, CALM), 0.0),
    Limit("periodic", "f = 0, c given", lambda: cost.periodic_waste(CALM, 0.01).per_useful_second, 0.2),
    Limit("periodic", "o = 0", lambda: waste(cost.periodic_waste, FREE_SAVES), RATE * 50),
    Limit("periodic", "c = 0", lambda: cost.periodic_waste(JOB, 0.0).share, 1.0),
    Limit("periodic", "N = 1", lambda: waste(cost.periodic_waste, ALONE),
          2 * math.sqrt(RATE / 100 * 10) + RATE / 100 * 50),
    Limit("user-level JIT", "N = 1", lambda: waste(cost.user_level_jit_waste, ALONE),
          0.001 + RATE / 100 * (20 + 50 + 2)),
    Limit("user-level JIT", "f = 0", lambda: waste(cost.user_level_jit_waste, CALM), 0.001),
    Limit("user-level JIT", "o = 0", lambda: waste(cost.user_level_jit_waste, FREE_SAVES), 0.001 + RATE * 52),
    Limit("user-level JIT", "t = 0", lambda: waste(cost.user_level_jit_waste, INSTANT),
          0.001 + RATE / 100 * 20 + RATE * 50),
    Limit("transparent JIT", "N = 1", lambda: waste(cost.transparent_jit_waste, ALONE), 0.001 + RATE / 50),
    Limit("transparent JIT", "f = 0", lambda: waste(cost.transparent_jit_waste, CALM), 0.001),
    Limit("transparent JIT", "t = 0", lambda: waste(cost.transparent_jit_waste, INSTANT), 0.001),
    Limit("GEMINI, eq. 1", "all 0", lambda: cost.average_wasted_seconds(0, 0, 0), 0.0),
    Limit("GEMINI, eq. 2", "t_ckpt = 0", lambda: cost.shortest_interval_seconds(0, 7), 7.0),
    Limit("GEMINI, eq. 2", "t_ckpt = T_iter", lambda: cost.shortest_interval_seconds(7, 7), 7.0),
    Limit("money", "nothing wasted", lambda: cost.money_per_month(8, 0.0, 4.0), 0.0),
    Limit("money", "everything wasted", lambda: cost.money_per_month(1, 1.0, 4.0), 2880.0),
    Limit("money", "free", lambda: cost.money_per_month(8, 0.5, 0.0), 0.0),
    Limit("expected time", "f = 0",
          lambda: exact.expected_seconds(exact.Schedule(10, 2.0, 1, 10, 5.0), [kind(0.0)]), 20.0),
    Limit("expected time", "one minibatch",
          lambda: exact.expected_seconds(exact.Schedule(1, 2.0, 1, 1, 5.0), [kind(0.1, 0.0)]),
          math.expm1(0.2) / 0.1),
    Limit("expected time", "save takes nothing",
          lambda: exact.expected_seconds(exact.Schedule(2, 2.0, 2, 1, 0.0), [kind(0.1, 0.0)]),
          2 * math.expm1(0.2) / 0.1),
    Limit("steady waste", "f = 0", lambda: exact.steady_waste(2.0, 5, 1.0, [kind(0.0)]), 0.1),
    Limit("steady waste", "f = 0, no saves", lambda: exact.steady_waste(2.0, None, 1.0, []), 0.0),
    Limit("steady waste", "rolls back, no saves", lambda: exact.steady_waste(2.0, None, 1.0, [kind(1e-3)]),
          math.inf),
    Limit("best saves", "f = 0", lambda: exact.best_minibatches_per_save(2.0, 5.0, [kind(0.0)]), None),
    Limit("best saves", "o = 0", lambda: exact.best_minibatches_per_save(2.0, 0.0, [kind(1e-3)]), 1),
    Limit("best saves", "one minibatch",
          lambda: exact.best_schedule(1, 2.0, 5.0, [kind(1e-3)])[0].segments, 1),
    Limit("Daly", "o = 0", lambda: exact.daly_interval_seconds(0.0, 1e-3), 0.0),
    Limit("Lambert", "o = 0", lambda: exact.exact_interval_seconds(0.0, 1e-3), 0.0),
    *(
        limit
        for way in ("group", "ring", "mixed")
        for limit in (
            Limit(f"recovery, {way}", "N = 1, k = 0", partial(recovery, 1, 1, 0, way), 1),
            Limit(f"recovery, {way}", "N = 1, k = 1", partial(recovery, 1, 1, 1, way), 0),
            Limit(f"recovery, {way}", "m = N, k = N - 1", partial(recovery, 9, 9, 8, way), 1),
            Limit(f"recovery, {way}", "m = N, k = N", partial(recovery, 9, 9, 9, way), 0),
            Limit(f"recovery, {way}", "m = 1, k = 1", partial(recovery, 9, 1, 1, way), 0),
            Limit(f"recovery, {way}", "k = 0", partial(recovery, 12, 3, 0, way), 1),
            Limit(f"recovery, {way}", "k = m - 1", partial(recovery, 12, 3, 2, way), 1),
            Limit(f"recovery, {way}", "k = N", partial(recovery, 12, 3, 12, way), 0),
        )
    ),
    Limit("Corollary 1", "k = 0", lambda: counting.corollary_1(12, 3, 0), 1),
    Limit("Corollary 1", "k = N", lambda: counting.corollary_1(12, 3, 12), 0),
    Limit("Corollary 1", "m = N, k = N", lambda: counting.corollary_1(9, 9, 9), 0),
    Limit("any placement", "N = 1", lambda: counting.surviving_losses([(0,)], 1), [1, 0]),
    Limit("any placement", "no checkpoints", lambda: counting.surviving_losses([], 3), [1, 3, 3, 1]),
    Limit("any placement", "m = N", lambda: counting.surviving_losses([(0, 1, 2)], 3), [1, 3, 3, 0]),
    Limit("any placement", "most_lost = 0", lambda: counting.surviving_losses([(0, 1)], 3, 0), [1]),
    Limit("Algorithm 1", "N = 1", lambda: mixed_placement(1, 1).holders, ((0,),)),
    Limit("Algorithm 1", "m = N", lambda: set(map(frozenset, mixed_placement(5, 5).holders)),
          {frozenset(range(5))}),
    Limit("ring", "m = N", lambda: set(map(frozenset, ring_placement(5, 5).holders)), {frozenset(range(5))}),
    Limit("placement", "N = 1", lambda: place([Machine(("rack",))], 1, 1.0).holders, ((0,),)),
    Limit("placement", "m = N", lambda: place([Machine((str(i),)) for i in range(3)], 3, 1.0).avoids, (0,)),
    Limit("placement", "no bytes, no memory",
          lambda: place([Machine((), 0.0)] * 2, 2, 0.0).holders, ((0, 1), (1, 0))),
    Limit("traffic", "m = 1", lambda: chunks(100.0, 1), 0),
    Limit("traffic", "no bytes", lambda: chunks(0.0, 3), 0),
    Limit("traffic", "infinite bandwidth",
          lambda: schedule_traffic(SPANS, 100.0, 2, Link(math.inf, 0.5)).chunks[-1].send_end_seconds, 0.5),
    Limit("traffic", "spans of no length, all in the last",
          lambda: {c.span for c in schedule_traffic([Span(0, 0), Span(1, 0)], 100.0, 2, LINK).chunks}, {1}),
    Limit("unprotected", "D = 1", lambda: redundancy.unprotected(840.0, 1).snapshot_bytes, 840.0),
    Limit("ARC", "D = 2", lambda: redundancy.arc(840.0, 2), redundancy.Costs(420.0, 420.0, 420.0, 1)),
    Limit("ARC", "copies = D - 1",
          lambda: redundancy.arc(840.0, 4, 3), redundancy.Costs(210.0, 630.0, 630.0, 3)),
    Limit("AEC", "D = 2: a copy", lambda: redundancy.aec(840.0, 2), redundancy.arc(840.0, 2)),
    Limit("ARC and AEC", "D = 3: two copies", lambda: redundancy.arc_with_aec(840.0, 3),
          redundancy.arc(840.0, 3, 2)),
    Limit("AOR", "no optimizer, no gradients: ARC", lambda: redundancy.aor(840.0, 0.0, 0.0, 4),
          redundancy.arc(840.0, 4)),
    Limit("redundancy", "nothing to keep", lambda: redundancy.arc(0.0, 4).host_memory_bytes(), 0.0),
    Limit("survival", "t = 0", lambda: survival.job_survival(NODE, 8, 4, 0, 0.0), 1.0),
    Limit("survival", "N = 1", lambda: survival.job_survival(NODE, 1, 1, 0, 10.0), NODE.alive(10.0)),
    Limit("survival", "one group of all, all may be lost",
          lambda: survival.job_survival(NODE, 8, 8, 8, 1e9), 1.0),
    Limit("survival", "t without end", lambda: survival.job_survival(NODE, 8, 4, 3, 1e9), 0.0),
    Limit("flush", "one GPU", lambda: exact_flush(Flush(one_gpu(2.0), (9.0,), (1.0,))).blocking_seconds, 4.0),
    Limit("flush", "nothing free",
          lambda: exact_flush(Flush(one_gpu(2.0), (9.0,), (0.0,))).blocking_seconds, 4.5),
    Limit("flush", "fits to the byte",
          lambda: exact_flush(Flush(one_gpu(2.0, 8.0), (9.0,), (1.0,))).blocking_seconds, 4.0),
    Limit("flush", "everything fits, zero bandwidth",
          lambda: exact_flush(Flush(one_gpu(0.0), (9.0,), (9.0,))).blocking_seconds, 0.0),
    *(
        Limit(f"flush, {way.__name__}", "no bytes",
              partial(nothing_over, way), 0.0)
        for way in (baseline, greedy, min_time_max_flow)
    ),
    Limit("flush", "two nodes without a network are two nodes", lambda: exact_flush(
        Flush(several_nodes(dgx1(), 2, 0.0), (9e9, *(0.0,) * 15), (0.0,) * 8 + (9e9,) * 8)).blocking_seconds,
        0.75),
    Limit("failures", "rates of zero",
          lambda: describe(failure("x", "gpu", 0.0, "gpu")).failures_per_second, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.formula}: {limit.limit}")
def test_limit(limit: Limit) -> None:
    found = limit.ours()
    assert found == (
        pytest.approx(limit.expected, rel=1e-9) if isinstance(limit.expected, float) else limit.expected
    )


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("failures_per_second is 0: it must be above 0", lambda: exact.daly_interval_seconds(1.0, 0.0)),
        ("failures_per_second is 0: it must be above 0", lambda: exact.exact_interval_seconds(1.0, 0.0)),
        ("bytes_per_second is 0: it must be above 0", lambda: Link(0.0, 0.1)),
        ("copy_bytes_per_second is 0: it must be above 0", lambda: Link(1.0, 0.1, 0.0)),
        ("nvlink_bytes_per_second is 0: it must be above 0", lambda: dgx1(0.0)),
        ("nowhere to go", lambda: exact_flush(Flush(one_gpu(0.0), (9.0,), (1.0,)))),
        ("replicas is 0: it must be a whole number from 1 to 4", lambda: mixed_placement(4, 0)),
        ("replicas is 5: it must be a whole number from 1 to 4", lambda: ring_placement(4, 5)),
        ("machines is 0: it must be a whole number of at least 1", lambda: recovery(0, 1, 0, "ring")),
    ],
)
def test_limits_that_have_no_answer_are_refused(what: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match=what):
        call()


def times_scaled(kinds: list[exact.FailureKind]) -> list[exact.FailureKind]:
    return [
        replace(k, failures_per_second=k.failures_per_second / 10, outage_seconds=10 * k.outage_seconds)
        for k in kinds
    ]


KINDS = [kind(1e-3), kind(2e-3, 5.0, rolls_back=False)]
SLOW = times_scaled(KINDS)
SIZES, ROOM = (9e8, 1e8, 5e8, 0.0, 2e8, 3e8, 4e8, 1e8), (3e8,) * 8


@dataclass(frozen=True)
class Scaling:
    """`tenfold` is the formula with the unit named ten times smaller: the result is `factor` as large."""

    formula: str
    unit: str
    factor: float
    plain: Callable[[], float]
    tenfold: Callable[[], float]


def blocking(sizes: float = 1.0, nvlink: float = 24e9, host: float = 12e9) -> float:
    scaled = [tuple(sizes * size for size in column) for column in (SIZES, ROOM)]
    return exact_flush(Flush(dgx1(nvlink, host), scaled[0], scaled[1])).blocking_seconds


SCALINGS = [
    Scaling("expected time", "time", 10,
            lambda: exact.expected_seconds(exact.Schedule(50, 2.0, 5, 10, 4.0), KINDS),
            lambda: exact.expected_seconds(exact.Schedule(50, 20.0, 5, 10, 40.0), SLOW)),
    Scaling("steady waste", "time", 1, lambda: exact.steady_waste(2.0, 9, 4.0, KINDS),
            lambda: exact.steady_waste(20.0, 9, 40.0, SLOW)),
    Scaling("best saves", "time", 1, lambda: exact.best_minibatches_per_save(2.0, 4.0, KINDS) or 0,
            lambda: exact.best_minibatches_per_save(20.0, 40.0, SLOW) or 0),
    Scaling("best schedule", "time", 10, lambda: exact.best_schedule(50, 2.0, 4.0, KINDS)[1],
            lambda: exact.best_schedule(50, 20.0, 40.0, SLOW)[1]),
    *(
        Scaling(name, "time", 10, partial(way, 3.0, 1e-3), partial(way, 30.0, 1e-4))
        for name, way in (("Daly", exact.daly_interval_seconds), ("Lambert", exact.exact_interval_seconds))
    ),
    Scaling("GEMINI, eq. 1", "time", 10, lambda: cost.average_wasted_seconds(3, 4, 5),
            lambda: cost.average_wasted_seconds(30, 40, 50)),
    Scaling("GEMINI, eq. 2", "time", 10, lambda: cost.shortest_interval_seconds(9, 4),
            lambda: cost.shortest_interval_seconds(90, 40)),
    Scaling("money", "currency", 10, lambda: cost.money_per_month(8, 0.1, 4.0),
            lambda: cost.money_per_month(8, 0.1, 40.0)),
    *(
        Scaling(way.__name__, "bytes", 10, partial(host_memory, way, 84.0),
                partial(host_memory, way, 840.0))
        for way in (redundancy.unprotected, redundancy.arc, redundancy.aec, redundancy.arc_with_aec)
    ),
    Scaling("AOR", "bytes", 10, lambda: redundancy.aor(20, 120, 20, 8).host_memory_bytes(),
            lambda: redundancy.aor(200, 1200, 200, 8).host_memory_bytes()),
    Scaling("survival", "time", 1, lambda: survival.job_survival(NODE, 8, 4, 1, 20.0),
            lambda: survival.job_survival(survival.Weibull(1000.0, 1.3), 8, 4, 1, 200.0)),
    Scaling("flush", "bytes", 10, blocking, lambda: blocking(sizes=10)),
    Scaling("flush", "bytes and bandwidth", 1, blocking,
            lambda: blocking(sizes=10, nvlink=240e9, host=120e9)),
    Scaling("flush", "bandwidth", 0.1, blocking, lambda: blocking(nvlink=240e9, host=120e9)),
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s.formula} by {s.unit}")
def test_units_scaled_by_ten(scaling: Scaling) -> None:
    plain = scaling.plain()
    assert plain > 0
    assert scaling.tenfold() == pytest.approx(scaling.factor * plain, rel=1e-9)


@pytest.mark.parametrize("policy", ["periodic=1h", "user-jit", "gemini+periodic=1h"])
def test_a_simulation_ten_times_slower_is_the_same_one(policy: str) -> None:
    """Every duration ten times as long, every rate and speed a tenth: each failure meets the same state."""
    crash, down = (("crash", "gpu", 0.02, "process"), ("down", "machine", 0.05, "machine"))
    fast = large(16, failure(*crash) + failure(*down), minibatch_time='"2 s"')
    slow = large(
        16, failure("crash", "gpu", 0.002, "process") + failure("down", "machine", 0.005, "machine"),
        minibatch_time='"20 s"', start_time='"900 s"', detection_time='"600 s"', communicator_time='"100 s"',
        replacement_time='"100 min"', repair_time='"240 h"', device_to_host='"5 GB/s"', network='"40 GB/s"',
        storage_write='"20 GB/s"', storage_read='"40 GB/s"',
    )  # fmt: skip
    shares = []
    for description, text, days in ((fast, policy, 30.0), (slow, policy.replace("1h", "10h"), 300.0)):
        parsed = parse_policy(text, description)
        per_save = analyse(description, parsed).minibatches_per_save
        failures = exponential_failures(description, 3)
        result = simulate(description, parsed, failures, days=days, minibatches_per_save=per_save)
        shares.append((result.minibatches, result.recoveries, result.wasted_share))
    # A clock that is not a power of two apart rounds otherwise: a minibatch may end on the other side.
    assert shares[0][1] == shares[1][1]
    assert abs(shares[0][0] - shares[1][0]) <= len(shares[0][1]) + 2
    assert shares[0][2] == pytest.approx(shares[1][2], rel=1e-4)
