import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from descriptions import describe, failure, large, triggers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from survival_times import seconds_until

from jitckpt.decisions.check import InvalidInput
from jitckpt.planning import cost, exact
from jitckpt.planning.cluster import Description
from jitckpt.planning.counting import recovery_probability
from jitckpt.planning.failures import (
    Failure,
    exponential_failures,
    recorded_failures,
    weibull_failures,
    with_triggered,
)
from jitckpt.planning.plan import analyse
from jitckpt.planning.policies import OutageLoss, parse_policy
from jitckpt.planning.simulator import (
    OVERHEAD,
    RECOVERING,
    REDONE,
    SAVING,
    TRAINING,
    WAITING,
    Result,
    simulate,
)
from jitckpt.planning.survival import Weibull, job_survival

DAY = 86400.0


def play(
    description: Description, policy: str, days: float, seed: int, failures: Iterator[Failure] | None = None
) -> Result:
    parsed = parse_policy(policy, description)
    return simulate(
        description,
        parsed,
        exponential_failures(description, seed) if failures is None else failures,
        days=days,
        minibatches_per_save=analyse(description, parsed).minibatches_per_save,
        seed=seed,
    )


def assert_agrees(wastes: list[float], expected: float) -> None:
    """The mean within four standard errors: chance exceeds that once in 16,000 times, and seeds are fixed."""
    error = statistics.stdev(wastes) / math.sqrt(len(wastes))
    assert abs(statistics.fmean(wastes) - expected) < 4 * error
    assert error < 0.1 * expected  # or it would agree with anything


CRASH = failure("crash", "gpu", 0.02, "process")
BREAK = failure("break", "gpu", 0.01, "gpu")
DOWN = failure("down", "machine", 0.05, "machine")
BUG = failure("bug", "job", 3.0, "process")


@pytest.mark.parametrize(
    ("policy", "failures"),
    [
        ("periodic", CRASH + DOWN),
        ("periodic=20min", CRASH + BREAK),
        ("checkfreq", CRASH + DOWN),
        ("user-jit", CRASH + BREAK),
        ("transparent-jit", CRASH + BREAK + failure("link", "gpu", 0.01, "nothing")),
        ("user-jit+periodic", CRASH + BUG),
        ("transparent-jit+periodic=2h", CRASH + BREAK + BUG),
        ("gemini", CRASH + DOWN),
        ("gemini+periodic", CRASH + DOWN + failure("all", "job", 0.5, "machine")),
        ("reft", CRASH + BREAK + BUG),
        ("reft+periodic", CRASH + DOWN + BUG),
        ("user-jit+gemini=3+periodic", CRASH + DOWN + BUG),
    ],
)
def test_agrees_with_the_plan(policy: str, failures: str) -> None:
    """Steady waste by the exact model, against 24 runs of it."""
    description = large(16, failures, spare_machines="2000", host='"4 TiB"')
    wastes = [play(description, policy, 60, seed).wasted_share for seed in range(24)]
    assert_agrees(wastes, analyse(description, parse_policy(policy, description)).wasted_share)


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("policy", ["periodic", "user-jit+periodic", "gemini=1+periodic"])
def test_the_smallest_jobs_agree_with_the_plan(gpus: int, policy: str) -> None:
    description = describe(
        failure("crash", "gpu", 2.0, "process"),
        gpus_per_machine=str(gpus),
        data=str(gpus),
        tensor="1",
        parameters="2e9",
    )
    analysis = analyse(description, parse_policy(policy, description))
    first = policy.replace("=", "+").partition("+")[0]
    # One GPU has no replica: just in time there is nothing to save from.
    recovers = "periodic" if gpus == 1 and first == "user-jit" else first
    assert analysis.outcomes[0].tier_shares == {recovers: 1.0}
    wastes = [play(description, policy, 60, seed).wasted_share for seed in range(16)]
    assert_agrees(wastes, analysis.wasted_share)


def first_order_job(description: Description, policy: str) -> cost.JobCosts:
    """What the papers' formulas take, from the steps that the simulator plays."""
    tier = parse_policy(policy, description).tiers[0]
    save = tier.times.jit_save if policy == "user-jit" else tier.times.snapshot + tier.times.write
    outage = tier.outage_seconds(OutageLoss()) - (save if policy == "user-jit" else 0)
    job = description.job
    per_gpu_day = description.failures_per_second * DAY / job.mesh.gpus
    return cost.JobCosts(job.mesh.gpus, per_gpu_day, save, outage, job.minibatch_seconds)


def test_agrees_with_equation_1_where_failures_are_rare() -> None:
    """First-order periodic waste; 12 failures a thousand days hardly meet."""
    description = describe(failure("crash", "job", 0.2, "process"), days="300")
    job = first_order_job(description, "periodic")
    expected = cost.periodic_waste(job, 1 / (4 * 3600)).share
    wastes = [play(description, "periodic=4h", 1000, seed).wasted_share for seed in range(20)]
    assert_agrees(wastes, expected)


def waste_while_all_gpus_wait(job: cost.JobCosts) -> cost.Waste:
    """Eq. 7 with the save charged to every GPU that waits for it: N f o in place of f o."""
    return replace(cost.user_level_jit_waste(job), saving=job.failures_per_second * job.save_seconds)


def test_agrees_with_equation_7_where_failures_are_rare() -> None:
    """With the save charged to all GPUs; as printed, to one of them, it is below what is played."""
    description = describe(failure("crash", "gpu", 0.03, "process"), minibatch_time='"60 s"')
    job = first_order_job(description, "user-jit")
    wastes = [play(description, "user-jit", 1000, seed).wasted_share for seed in range(20)]
    assert_agrees(wastes, waste_while_all_gpus_wait(job).share)
    assert statistics.fmean(wastes) > 1.05 * cost.user_level_jit_waste(job).share


def test_agrees_with_both_together_where_failures_are_rare() -> None:
    """A tenth of the failures take every replica."""
    failures = failure("crash", "gpu", 0.0225, "process") + failure("bug", "job", 0.02, "process")
    description = describe(failures)
    jit, periodic = (first_order_job(description, policy) for policy in ("user-jit", "periodic"))
    common = cost.JobCosts(8, 0.0225, jit.save_seconds, jit.restore_seconds, 2.0)
    rare = cost.JobCosts(8, 0.0025, periodic.save_seconds, periodic.restore_seconds)
    every = 6 * 3600
    expected = (
        waste_while_all_gpus_wait(common).per_useful_second
        + cost.periodic_waste(rare, 1 / every).per_useful_second
    )
    wastes = [play(description, "user-jit+periodic=6h", 1000, seed).wasted_share for seed in range(20)]
    assert_agrees(wastes, expected / (1 + expected))


def test_agrees_with_equation_8() -> None:
    """Transparent recovery without a fixed cost: half a minibatch a failure."""
    description = describe(
        failure("link", "gpu", 2.0, "nothing"),
        detection_time='"0 s"',
        communicator_time='"0 s"',
        minibatch_time='"60 s"',
    )
    expected = cost.transparent_jit_waste(cost.JobCosts(8, 2.0, 0.0, 0.0, 60.0)).share
    wastes = [play(description, "transparent-jit", 100, seed).wasted_share for seed in range(20)]
    assert_agrees(wastes, expected)


def test_agrees_with_geminis_equation_1() -> None:
    """1.5 checkpoint intervals redone a failure: t_ckpt + 1 / 2F."""
    description = large(
        4, failure("crash", "machine", 2.0, "process"), minibatch_time='"10 s"', network='"12 GB/s"'
    )
    gemini = parse_policy("gemini", description).tiers[0]
    assert gemini.checkpoint_minibatches > 3
    results = [play(description, "gemini", 60, seed) for seed in range(20)]
    redone = [result.seconds[REDONE] / sum(result.recoveries.values()) for result in results]
    interval = gemini.checkpoint_minibatches * 10.0
    assert_agrees(redone, cost.average_wasted_seconds(interval, interval, 0.0))


def test_agrees_with_the_expected_time_of_a_job_that_starts_over() -> None:
    """Without protection: wall time until the first stretch of the job's length, against the exact model."""
    description = describe(failure("crash", "job", 1.0, "process"), days="1")
    minibatches = round(DAY / 2)
    kind = exact.FailureKind("crash", 1 / DAY, 150.0, True)
    expected = exact.expected_seconds(exact.Schedule(minibatches, 2.0, 1, minibatches, 0.0), [kind])
    ends = []
    for seed in range(400):
        result = play(description, "none", 40, seed)
        for (start, done), (end, more) in itertools.pairwise(result.progress):
            if more - done >= 0 and more >= minibatches:
                ends.append(end - (more - minibatches) * 2.0)
                assert start < ends[-1]
                break
    assert len(ends) == 400
    assert_agrees(ends, expected)


def test_agrees_with_the_expected_time_of_a_job_with_saves() -> None:
    """Four segments, a save between two: wall time until the last minibatch, against the exact model."""
    description = describe(failure("crash", "job", 8.0, "process"), days="1")
    minibatches, per_save = 7200, 1800
    policy = parse_policy("periodic=1h", description)
    assert policy.files is not None
    stall = policy.files.stall_seconds
    kind = exact.FailureKind("crash", 8 / DAY, policy.files.outage_seconds(OutageLoss()), True)
    expected = exact.expected_seconds(exact.Schedule(minibatches, 2.0, 4, per_save, stall), [kind])
    ends = []
    for seed in range(300):
        result = play(description, "periodic=1h", 3, seed)
        stretch = next(a for a, b in itertools.pairwise(result.progress) if b[1] >= minibatches)
        left = minibatches - stretch[1]  # whole segments: an outage goes back to a save
        ends.append(stretch[0] + left * 2.0 + (left // per_save - 1) * stall)
    assert_agrees(ends, expected)


def test_the_best_interval_is_best_when_played() -> None:
    """Eq. 3 and its exact form: with the same failures, a third and three times as many saves waste more."""
    description = large(16, CRASH, spare_machines="2000")
    parsed = parse_policy("periodic", description)
    best = analyse(description, parsed).minibatches_per_save
    assert best is not None
    wastes = []
    for per_save in (best // 3, best, 3 * best):
        results = [
            simulate(
                description, parsed, exponential_failures(description, seed), days=60,
                minibatches_per_save=per_save,
            )
            for seed in range(8)
        ]  # fmt: skip
        wastes.append(statistics.fmean(result.wasted_share for result in results))
    assert wastes[1] < 0.95 * min(wastes[0], wastes[2])
    job = first_order_job(description, "periodic")
    young = 1 / cost.optimal_saves_per_second(job) / description.job.minibatch_seconds
    assert best == pytest.approx(young, rel=0.1)


@pytest.mark.parametrize(("lost", "replicas"), [(2, 2), (3, 2), (4, 3)])
def test_machines_lost_at_once_are_recovered_from_memory_as_often_as_counted(
    lost: int, replicas: int
) -> None:
    description = large(15 if replicas == 3 else 16, DOWN, machines_per_rack="1", host='"4 TiB"')
    count = description.cluster.machines
    generator = random.Random(lost)
    runs = 400
    recovered = 0
    for _ in range(runs):
        chosen = sorted(generator.sample(range(count), lost))
        at_once = [one("down", 9000.0, machine, description) for machine in chosen]
        result = play(description, f"gemini={replicas}+periodic=1h", 0.15, 0, iter(at_once))
        recovered += result.recoveries.get("gemini", 0)
    expected = float(recovery_probability(count, replicas, lost))
    assert abs(recovered / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


@pytest.mark.parametrize("method", ["arc", "arc-aec"])
def test_what_memory_keeps_while_machines_age_agrees_with_the_survival(method: str) -> None:
    """Two sharding groups of eight machines; who has failed by a time, by the sequences that are played."""
    description = large(
        16, failure("down", "machine", 0.05, "machine"), pipeline="2", data="8", tensor="8", host='"4 TiB"'
    )
    reft = parse_policy(f"reft={method}", description).tiers[0]
    losses = {"arc": 1, "arc-aec": 2}[method]
    life = Weibull.of_mean(20 * DAY, 1.4)
    until = seconds_until(life, 16, 8, losses, 0.6)
    runs = 1500
    survived = 0
    for seed in range(runs):
        failed = {f.component for f in weibull_failures(description, 1.4, until, seed)}
        survived += reft.recovers(OutageLoss(host_machines=frozenset(failed)))
    expected = job_survival(life, 16, 8, losses, until)
    assert abs(survived / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_no_failures_no_waste_but_saves() -> None:
    description = describe("")
    result = play(description, "periodic=1h", 30, 1)
    assert result.minibatches * 2.0 == result.seconds[TRAINING]
    assert result.seconds[SAVING] / result.seconds[TRAINING] == pytest.approx((1.12 + 22.4) / 3600, rel=0.01)
    assert result.seconds[RECOVERING] == result.seconds[WAITING] == 0
    assert play(description, "none", 30, 1).wasted_share < 1e-6
    assert play(description, "reft", 30, 1).seconds[OVERHEAD] == pytest.approx(
        30 * DAY * 0.01 / 1.01, rel=1e-4
    )


@settings(max_examples=60)
@example("reft", [(5.0, "link", 0), (82951.0, "rack", 0)])
@given(
    st.sampled_from(
        ["none", "periodic=17min", "checkfreq=5min", "user-jit+periodic=1h", "gemini+periodic=1h", "reft"]
    ),
    st.lists(
        st.tuples(
            st.floats(0, 1.1 * DAY),
            st.sampled_from(["link", "crash", "break", "down", "rack"]),
            st.integers(0, 7),
        ),
        max_size=30,
    ),
)
def test_time_adds_up_and_progress_is_real(policy: str, events: list[tuple[float, str, int]]) -> None:
    """Whatever fails whenever: every second has one cause, and what is done fits the time."""
    modes = (
        failure("link", "gpu", 1.0, "nothing") + failure("crash", "gpu", 1.0, "process")
        + failure("break", "gpu", 1.0, "gpu") + failure("down", "machine", 1.0, "machine")
        + failure("rack", "rack", 1.0, "machine")
    )  # fmt: skip
    description = large(8, modes, spare_machines="1", repair_time='"2 h"')
    by_name = {mode.name: mode for mode in description.failures}
    failures = [
        Failure(at, by_name[name], component % description.components(by_name[name].scope))
        for at, name, component in sorted(events)
    ]
    result = play(description, policy, 1.0, 0, iter(failures))
    assert sum(result.seconds.values()) == pytest.approx(DAY)
    assert all(seconds >= -1e-6 for seconds in result.seconds.values())
    assert result.seconds[TRAINING] == result.minibatches * 2.0
    assert sum(result.failures.values()) == sum(at < DAY for at, _, _ in events)
    assert sum(result.recoveries.values()) == len(result.outages)
    clocks = [clock for clock, _ in result.progress]
    assert clocks == sorted(clocks)
    for before, after in itertools.pairwise(result.outages):
        assert before.end_seconds <= after.start_seconds
    for (start, done), (end, more) in itertools.pairwise(result.progress):
        assert (more - done) * 2.0 <= end - start + 1e-6


def one(name: str, at: float, component: int, description: Description) -> Failure:
    return Failure(at, next(mode for mode in description.failures if mode.name == name), component)


def test_a_second_failure_in_an_outage_can_take_the_last_replica() -> None:
    """Two data-parallel replicas of every shard, on machines 0 and 1."""
    description = describe(DOWN, machines="2", gpus_per_machine="4", spare_machines="9")
    alone = play(description, "user-jit+periodic=1h", 1, 0, iter([one("down", 7200.5, 0, description)]))
    assert alone.recoveries == {"user-jit": 1}
    assert alone.outages[0].lost_minibatches == 0
    both = [one("down", 9000.5, 0, description), one("down", 9100.5, 1, description)]
    result = play(description, "user-jit+periodic=1h", 1, 0, iter(both))
    assert result.recoveries == {"periodic": 1}
    assert result.outages[0].failures == 2
    assert result.outages[0].lost_minibatches > 700  # nearly half an hour since the second save
    later = [one("down", 7200.5, 0, description), one("down", 80000.5, 1, description)]
    assert play(description, "user-jit+periodic=1h", 1, 0, iter(later)).recoveries == {"user-jit": 2}


def test_machines_are_waited_for_when_no_spare_is_left() -> None:
    description = large(8, DOWN, spare_machines="1", repair_time='"3 h"')
    failures = [one("down", 1000.0, 0, description), one("down", 1001.0, 5, description)]
    result = play(description, "gemini", 1, 0, iter(failures))
    assert result.seconds[WAITING] == pytest.approx(3 * 3600 - 1)  # until the first is back
    again = [*failures, one("down", 50_000.0, 2, description)]
    assert play(description, "gemini", 1, 0, iter(again)).seconds[WAITING] == pytest.approx(3 * 3600 - 1)


def test_more_failures_in_an_outage_are_no_waiting_while_spares_last() -> None:
    description = large(8, DOWN, spare_machines="3")
    failures = [one("down", 1000.0 + 100 * i, i, description) for i in range(3)]
    result = play(description, "gemini", 1, 0, iter(failures))
    assert result.outages[0].failures == 3
    assert result.seconds[WAITING] == 0
    short = large(8, DOWN, spare_machines="0", repair_time='"50 s"')
    # Each is waited for 50 s; the next comes 100 s after.
    assert play(short, "gemini", 1, 0, iter(failures)).seconds[WAITING] == pytest.approx(150)


def test_a_background_save_counts_only_when_it_is_whole() -> None:
    description = describe(BUG, storage_write='"0.2 GB/s"')
    policy = parse_policy("checkfreq=15min", description)
    assert policy.files is not None
    lag = policy.files.lag_seconds
    assert 500 < lag < 800
    stall = policy.files.stall_seconds
    for after, lost in ((lag - 5, 450 + (lag - 5) // 2), (lag + 5, (lag + 5) // 2)):
        event = one("bug", 900 + stall + 900 + stall + after, 0, description)
        result = play(description, "checkfreq=15min", 0.5, 0, iter([event]))
        assert result.outages[0].lost_minibatches == pytest.approx(lost, abs=1)


def test_exponential_failures_have_their_rates() -> None:
    description = large(16, CRASH + DOWN)
    found = list(
        itertools.takewhile(lambda f: f.at_seconds < 2000 * DAY, exponential_failures(description, 4))
    )
    for mode in description.failures:
        mine = [f for f in found if f.mode is mode]
        expected = mode.per_day * description.components(mode.scope) * 2000
        assert abs(len(mine) - expected) < 4 * math.sqrt(expected)
        counts = np.bincount([f.component for f in mine], minlength=description.components(mode.scope))
        assert counts.min() > 0
    assert list(itertools.islice(exponential_failures(describe(""), 1), 3)) == []


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.0])
def test_weibull_failures_renew(shape: float) -> None:
    description = large(16, CRASH)
    until = 3000 * DAY  # 60 failures of each component
    found = list(weibull_failures(description, shape, until, 5))
    assert all(a.at_seconds <= b.at_seconds for a, b in itertools.pairwise(found))
    expected = 0.02 * 128 * 3000
    assert len(found) == pytest.approx(expected, rel=0.06 if shape < 1 else 0.04)
    times: dict[int, list[float]] = {}
    for f in found:
        times.setdefault(f.component, []).append(f.at_seconds)
    gaps = [b - a for each in times.values() for a, b in itertools.pairwise(each)]
    spread = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(spread, rel=0.06)


def test_triggered_failures_come_as_often_as_the_closed_form_says() -> None:
    """A feed takes machines with it, a machine others of its rack, those go on; and GPUs of their own."""
    description = large(
        16,
        failure("feed", "power", 1.0, "machine") + triggers("down", 0.5, "power", "40 s")
        + failure("down", "machine", 0.3, "machine") + triggers("down", 0.3, "rack", "20 s")
        + triggers("crash", 0.8, "machine")
        + failure("crash", "gpu", 0.01, "process"),
        racks_per_power_domain="2",
    )  # fmt: skip
    days = 2000
    first = itertools.takewhile(lambda f: f.at_seconds < days * DAY, exponential_failures(description, 4))
    found = list(with_triggered(description, first, 4))
    assert all(a.at_seconds <= b.at_seconds for a, b in itertools.pairwise(found))
    counts = Counter(failure.mode.name for failure in found)
    for name, per_day in description.per_day.items():
        # A failure brings up to two others on average: the spread is wider than that of single ones.
        assert abs(counts[name] - per_day * days) < 4 * 2 * math.sqrt(per_day * days), name


def test_triggered_failures_hit_their_neighbourhood_and_never_the_same_component() -> None:
    description = large(
        16,
        failure("down", "machine", 1.0, "machine") + triggers("again", 1.0, "rack", "5 s")
        + failure("again", "machine", 0.0, "machine") + triggers("switch", 1.0, "machine")
        + failure("switch", "switch", 0.0, "nothing") + triggers("feed", 1.0, "gpu")
        + failure("feed", "power", 0.0, "process"),
        racks_per_switch="2",
        racks_per_power_domain="3",
    )  # fmt: skip
    down = description.failures[0]
    seen = set()
    for seed in range(40):
        found = list(with_triggered(description, iter([Failure(7.0, down, 6)]), seed))
        assert [f.mode.name for f in found] == ["down", "again", "switch", "feed"]
        assert [f.at_seconds for f in found] == [7.0, 12.0, 12.0, 12.0]
        assert found[2].component == 0  # the switch of that machine
        assert found[3].component == 0  # machines 0 to 11
        seen.add(found[1].component)
    assert seen == {4, 5, 7}
    alone = describe(failure("down", "machine", 1.0, "machine") + triggers("down", 0.9))
    assert len(list(with_triggered(alone, iter([Failure(7.0, alone.failures[0], 0)]), 1))) == 1


def test_a_cascade_that_takes_both_machines_of_a_group_is_as_likely_as_counted() -> None:
    """Memory keeps two copies; a failure takes the machine with the other copy 1 time in 15."""
    description = large(
        16, failure("down", "machine", 0.05, "machine") + triggers("down", 0.4, delay="10 s"), host='"4 TiB"'
    )
    results = [play_with_triggers(description, "gemini+periodic", 300, seed) for seed in range(8)]
    outages = [sum(result.recoveries.values()) for result in results]
    lost = sum(result.recoveries.get("periodic", 0) for result in results)
    # k machines in a cascade, k geometric: 1 - the chance that no two are of one group.
    chance = sum(0.6 * 0.4 ** (k - 1) * (1 - float(recovery_probability(16, 2, k))) for k in range(1, 9))
    # From three on a cascade may come back to a machine that it has had: far less than the error allowed.
    expected = chance * sum(outages)
    assert abs(lost - expected) < 4 * math.sqrt(expected)
    assert expected > 30


def play_with_triggers(description: Description, policy: str, days: float, seed: int) -> Result:
    return play(
        description,
        policy,
        days,
        seed,
        with_triggered(description, exponential_failures(description, seed), seed),
    )


def test_a_power_domain_takes_several_machines_at_once() -> None:
    """Two racks a feed: who keeps copies in other feeds goes on from memory, whose replicas it had cannot."""
    description = large(
        16,
        failure("feed", "power", 1.0, "machine") + DOWN,
        racks_per_power_domain="2",
        machines_per_rack="2",
        spare_machines="16",
    )
    feed = [one("feed", 9000.0, 1, description)]
    result = play(description, "gemini+periodic=1h", 1, 0, iter(feed))
    assert result.recoveries == {"gemini": 1}
    one_feed = large(
        4, failure("feed", "power", 1.0, "machine"), racks_per_power_domain="2", machines_per_rack="2"
    )
    all_of_it = play(one_feed, "gemini+periodic=1h", 1, 0, iter([one("feed", 9000.0, 0, one_feed)]))
    assert all_of_it.recoveries == {"periodic": 1}


@pytest.mark.parametrize("policy", ["periodic", "user-jit", "gemini+periodic"])
def test_recoveries_that_fail_agree_with_the_plan(policy: str) -> None:
    crash = CRASH + "recovery_fails_share = 0.6\n"
    description = large(16, crash, spare_machines="2000")
    wastes = [play(description, policy, 60, seed).wasted_share for seed in range(16)]
    expected = analyse(description, parse_policy(policy, description)).wasted_share
    assert_agrees(wastes, expected)
    calm = large(16, CRASH, spare_machines="2000")
    assert expected > 1.4 * analyse(calm, parse_policy(policy, calm)).wasted_share


def test_recorded_failures(tmp_path: Path) -> None:
    description = large(8, CRASH + DOWN)
    path = tmp_path / "failures.csv"
    path.write_text("seconds,failure,component\n10,crash,63\n20.5,down,7\n")
    assert [(f.at_seconds, f.mode.name, f.component) for f in recorded_failures(description, path)] == [
        (10.0, "crash", 63), (20.5, "down", 7),
    ]  # fmt: skip
    for rows, message in (
        ("seconds,what\n", "it must have seconds, failure, component"),
        (
            "seconds,failure,component\n1,flood,0\n",
            "failure in line 2 of .* is 'flood': it must be one of crash, down",
        ),
        (
            "seconds,failure,component\n1,down,8\n",
            "component in line 2 .* is 8: it must be a number from 0 to 7",
        ),
        ("seconds,failure,component\n5,down,0\n4,down,0\n", "seconds in line 3"),
        ("seconds,failure,component\nnan,down,0\n", "seconds in line 2 .* is nan"),
        ("seconds,failure,component\nsoon,down,0\n", "line 2 of .* must have a number of seconds"),
    ):
        path.write_text(rows)
        with pytest.raises(InvalidInput, match=message):
            list(recorded_failures(description, path))


def test_a_hundred_thousand_gpus_take_events_not_seconds() -> None:
    """The work is bounded by the number of failures; scripts/bench/planning.py measures what it takes."""
    description = large(
        12_500, CRASH + DOWN, spare_machines="12500", storage_write='"20 TB/s"', storage_read='"40 TB/s"'
    )
    result = play(description, "transparent-jit+periodic", 2, 1)
    assert sum(result.failures.values()) > 2000
    assert len(result.progress) <= 2 * sum(result.failures.values()) + 3


def test_nonsense_is_refused() -> None:
    description = describe()
    policy = parse_policy("none", description)
    with pytest.raises(InvalidInput, match="days is -1"):
        simulate(description, policy, [], days=-1)
    with pytest.raises(InvalidInput, match="minibatches_per_save is 0"):
        simulate(description, policy, [], days=1, minibatches_per_save=0)
