import itertools
import math
import random

import pytest

from jitckpt.decisions.check import InvalidInput
from jitckpt.planning import cost, exact
from jitckpt.planning.exact import FailureKind, Schedule


def segment(length: float, restart: float, rate: float) -> float:
    """Daly's exact time for work that must be done in one go, failures during restarts included."""
    return math.exp(rate * restart) * math.expm1(rate * length) / rate


def rolling_back(rate: float, outage: float = 0.0, **more: float) -> FailureKind:
    return FailureKind("rolls back", rate, outage, True, **more)


def resuming(rate: float, outage: float = 0.0) -> FailureKind:
    return FailureKind("resumes", rate, outage, False)


def test_agrees_with_daly_for_failures_that_roll_back() -> None:
    rate, restart, save = 1 / 300, 20.0, 5.0
    schedule = Schedule(120, 1.0, 4, 30, save)
    expected = 3 * segment(30 + save, restart, rate) + segment(30, restart, rate)
    assert exact.expected_seconds(schedule, [rolling_back(rate, restart)]) == pytest.approx(
        expected, rel=1e-12
    )


def test_agrees_with_daly_for_minibatches_that_are_redone() -> None:
    rate, outage = 1 / 50, 7.0
    schedule = Schedule(40, 2.0, 1, 40, 0.0)
    expected = 40 * segment(2.0, outage, rate)
    assert exact.expected_seconds(schedule, [resuming(rate, outage)]) == pytest.approx(expected, rel=1e-12)


def test_without_failures_only_saves_cost() -> None:
    assert exact.expected_seconds(Schedule(100, 1.5, 5, 20, 4.0), []) == 100 * 1.5 + 4 * 4.0
    assert exact.expected_seconds(Schedule(100, 1.5, 5, 20, 4.0, save_at_end=True), []) == 100 * 1.5 + 5 * 4.0
    assert (
        exact.expected_seconds(Schedule(100, 1.5, 5, 20, 4.0), [rolling_back(0.0, 9.0)])
        == 100 * 1.5 + 4 * 4.0
    )
    assert exact.steady_waste(2.0, None, 4.0, []) == 0
    assert exact.steady_waste(2.0, 10, 4.0, []) == pytest.approx(0.2)


def test_recoveries_that_fail_take_as_often_again() -> None:
    rate = 1e-9  # so rare that no failure comes into a recovery
    once = exact.steady_waste(1.0, None, 0.0, [resuming(rate, 100.0)])
    kind = FailureKind("resumes", rate, 100.0, False, recovery_fails_share=0.75)
    assert exact.steady_waste(1.0, None, 0.0, [kind]) / once == pytest.approx(4, rel=0.01)


def played(schedule: Schedule, kinds: list[FailureKind], generator: random.Random) -> float:
    """One run of the job, event by event, by the rules of the module's text."""
    rate = sum(kind.failures_per_second for kind in kinds)
    order = sorted(kinds, key=lambda kind: (kind.rolls_back, kind.outage_seconds))
    weights = [kind.failures_per_second for kind in order]
    others = schedule.segments - 1
    short, longer = divmod(schedule.minibatches - schedule.last_segment_minibatches, max(others, 1))
    lengths = [short + (i < longer) for i in range(others)]
    clock = 0.0
    for index, count in enumerate([*lengths, schedule.last_segment_minibatches]):
        stages = [schedule.minibatch_seconds] * count
        if index < others or schedule.save_at_end:
            stages.append(schedule.save_seconds)
        stage = 0
        while stage < len(stages):
            until = generator.expovariate(rate)
            if until >= stages[stage]:
                clock += stages[stage]
                stage += 1
                continue
            clock += until
            worst = generator.choices(range(len(order)), weights)[0]
            while True:
                kind = order[worst]
                until = generator.expovariate(rate)
                if until < kind.outage_seconds:
                    clock += until
                    worst = max(worst, generator.choices(range(len(order)), weights)[0])
                    continue
                clock += kind.outage_seconds
                if generator.random() >= kind.recovery_fails_share:
                    break
            if order[worst].rolls_back:
                stage = 0
    return clock


def test_agrees_with_playing_it() -> None:
    """Several kinds, frequent enough to fall into saves and recoveries."""
    kinds = [
        resuming(1 / 40, 3.0),
        FailureKind("resumes slowly", 1 / 60, 9.0, False, recovery_fails_share=0.2),
        rolling_back(1 / 70, 5.0),
        FailureKind("rolls back slowly", 1 / 90, 12.0, True, recovery_fails_share=0.1),
    ]
    schedule = Schedule(24, 1.5, 4, 6, 2.0)
    generator = random.Random(7)
    runs = [played(schedule, kinds, generator) for _ in range(20_000)]
    mean = sum(runs) / len(runs)
    deviation = math.sqrt(sum((run - mean) ** 2 for run in runs) / len(runs) / (len(runs) - 1))
    assert abs(mean - exact.expected_seconds(schedule, kinds)) < 4 * deviation


def test_first_order_is_its_limit() -> None:
    """Eq. 1 of the JIT paper counts failures one by one; so rare, nothing else happens."""
    job = cost.JobCosts(1, 1e-4, 30.0, 50.0)
    kind = rolling_back(job.failures_per_second, 50.0)
    count = round(1 / cost.optimal_saves_per_second(job))
    waste = exact.steady_waste(1.0, count, 30.0, [kind])
    assert waste == pytest.approx(cost.periodic_waste(job, 1 / count).per_useful_second, rel=1e-3)


@pytest.mark.parametrize("minibatches", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("save_at_end", [False, True])
def test_best_schedule_is_the_best_of_all_cuts(minibatches: int, save_at_end: bool) -> None:
    kinds = [rolling_back(1 / 20, 2.0), resuming(1 / 30, 1.0)]
    save = 0.8
    single = {
        (count, saved): exact.expected_seconds(Schedule(count, 1.0, 1, count, save, save_at_end=saved), kinds)
        for count in range(1, minibatches + 1)
        for saved in (False, True)
    }
    best = math.inf
    for pieces in range(1, minibatches + 1):
        for cuts in itertools.combinations(range(1, minibatches), pieces - 1):
            ends = [0, *cuts, minibatches]
            lengths = [b - a for a, b in itertools.pairwise(ends)]
            total = sum(single[length, True] for length in lengths[:-1]) + single[lengths[-1], save_at_end]
            best = min(best, total)
    schedule, seconds = exact.best_schedule(minibatches, 1.0, save, kinds, save_at_end)
    assert seconds == pytest.approx(best, rel=1e-12)
    assert exact.expected_seconds(schedule, kinds) == seconds


def test_best_interval_beats_its_neighbours() -> None:
    kinds = [rolling_back(1 / 5000, 60.0), resuming(1 / 2000, 30.0)]
    best = exact.best_minibatches_per_save(1.3, 12.0, kinds)
    assert best is not None
    least = exact.steady_waste(1.3, best, 12.0, kinds)
    for other in {1, best // 2, best - 1, best + 1, best * 2}:
        assert exact.steady_waste(1.3, other, 12.0, kinds) > least


def test_daly_and_young_approach_the_exact_interval() -> None:
    for save in (0.01, 1.0, 60.0):
        rate = 1 / 86400
        true = exact.exact_interval_seconds(save, rate)
        assert exact.daly_interval_seconds(save, rate) == pytest.approx(true, rel=2e-5)
        assert math.sqrt(2 * save / rate) == pytest.approx(true, rel=0.03)  # Young (1974)
        assert exact.exact_interval_seconds(10 * save, rate / 10) == pytest.approx(10 * true)
    found = exact.best_minibatches_per_save(1.0, 5.0, [rolling_back(1 / 3600, 10.0)])
    assert found == pytest.approx(exact.exact_interval_seconds(5.0, 1 / 3600), abs=1)


def test_limits_of_the_intervals() -> None:
    assert exact.exact_interval_seconds(0.0, 1.0) == 0
    assert exact.daly_interval_seconds(3.0, 1.0) == 1.0  # saves longer than two mean times between failures
    assert exact.exact_interval_seconds(1e3, 1.0) == pytest.approx(1.0)
    assert exact.best_minibatches_per_save(1.0, 0.0, [rolling_back(1e-3)]) == 1
    assert exact.best_minibatches_per_save(1.0, 5.0, [resuming(1e-3)]) is None
    assert exact.steady_waste(1.0, None, 5.0, [rolling_back(1e-3)]) == math.inf


def test_a_job_that_never_ends_is_refused() -> None:
    with pytest.raises(InvalidInput, match="would never end"):
        exact.best_minibatches_per_save(1.0, 1e6, [rolling_back(1.0)])
    with pytest.raises(InvalidInput, match="would never end"):
        exact.best_schedule(10, 1e6, 1.0, [rolling_back(1.0)])
    assert exact.expected_seconds(Schedule(10, 1e6, 1, 10, 1.0), [rolling_back(1.0)]) == math.inf


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput, match="outage_seconds of rolls back is -1"):
        rolling_back(1.0, -1.0)
    with pytest.raises(InvalidInput, match="no recovery would ever succeed"):
        rolling_back(1.0, 1.0, recovery_fails_share=1.0)
    with pytest.raises(InvalidInput, match="segments is 5: it must be a whole number from 1 to 4"):
        Schedule(4, 1.0, 5, 1, 1.0)
    with pytest.raises(InvalidInput, match="last_segment_minibatches is 3"):
        Schedule(4, 1.0, 3, 3, 1.0)
    with pytest.raises(InvalidInput, match="minibatch_seconds is 0"):
        Schedule(4, 0.0, 1, 4, 1.0)
