import math
from dataclasses import replace

import pytest

from jitckpt.decisions.check import InvalidInput
from jitckpt.planning import cost

# Table 4 of the JIT paper; failures as on 992 GPUs of OPT-175B.
BERT = cost.JobCosts(1024, 2e-3, 5.0, 9.9, 0.418, 0.00003 / 0.418)
GPT2_8B = cost.JobCosts(1024, 2e-3, 18.8, 28.6, 2.953)


def at(job: cost.JobCosts, gpus: int) -> cost.JobCosts:
    return replace(job, gpus=gpus)


@pytest.mark.parametrize(("gpus", "per_hour"), [(4, 0.346), (1024, 5.543), (8192, 15.677)])
def test_optimal_frequency_of_the_paper(gpus: int, per_hour: float) -> None:
    assert cost.optimal_saves_per_second(at(BERT, gpus)) * 3600 == pytest.approx(per_hour, abs=5e-4)


@pytest.mark.parametrize(
    ("job", "gpus", "percent"),
    [
        (BERT, 4, 0.096),
        (BERT, 1024, 1.539),
        (BERT, 8192, 4.345),
        (GPT2_8B, 1024, 2.963),
        (GPT2_8B, 8192, 8.245),
    ],
)
def test_periodic_waste_of_the_paper(job: cost.JobCosts, gpus: int, percent: float) -> None:
    assert 100 * cost.periodic_waste(at(job, gpus)).share == pytest.approx(percent, abs=5e-4)


@pytest.mark.parametrize(
    ("job", "gpus", "percent"),
    [
        (BERT, 4, 0.0073),
        (BERT, 1024, 0.0311),
        (BERT, 8192, 0.1985),
        (GPT2_8B, 1024, 0.0713),
        (GPT2_8B, 8192, 0.5671),
    ],
)
def test_user_level_waste_by_equation_7(job: cost.JobCosts, gpus: int, percent: float) -> None:
    assert 100 * cost.user_level_jit_waste(at(job, gpus)).share == pytest.approx(percent, abs=5e-5)


def test_money_of_section_5_1() -> None:
    one_failure = 900 / (24 * 3600)  # a day, all GPUs wait for a quarter of an hour
    assert cost.money_per_month(1000, one_failure, 4.0) == pytest.approx(30_000)
    assert cost.money_per_month(10_000, 10 * one_failure, 4.0) == pytest.approx(3_000_000)
    assert cost.money_per_month(1000, 0.01, 4.0) == pytest.approx(1000 * 0.01 * 720 * 4)


def test_the_optimum_is_one() -> None:
    best = cost.optimal_saves_per_second(BERT)
    least = cost.periodic_waste(BERT).per_useful_second
    assert least == pytest.approx(
        2 * math.sqrt(BERT.failures_per_second * 5.0 / 2) + BERT.failures_per_second * 9.9
    )
    for factor in (0.9, 1.1):
        assert cost.periodic_waste(BERT, best * factor).per_useful_second > least


def test_no_failures_no_waste_but_overhead() -> None:
    calm = replace(BERT, failures_per_gpu_day=0.0)
    assert cost.optimal_saves_per_second(calm) == 0
    assert cost.periodic_waste(calm).share == 0
    assert cost.user_level_jit_waste(calm).per_useful_second == calm.overhead_share
    assert cost.transparent_jit_waste(calm).per_useful_second == calm.overhead_share


def test_free_saves_leave_only_the_recovery() -> None:
    free = replace(BERT, save_seconds=0.0)
    assert cost.optimal_saves_per_second(free) == math.inf
    assert cost.periodic_waste(free).per_useful_second == pytest.approx(free.failures_per_second * 9.9)


def test_never_saving_gets_nowhere() -> None:
    assert cost.periodic_waste(BERT, 0.0).share == 1.0


def test_units_scaled_by_ten_scale_as_their_dimension() -> None:
    """Ten times longer times with ten times rarer failures are the same job in another unit of time."""
    slow = cost.JobCosts(1024, 2e-4, 50.0, 99.0, 4.18, BERT.overhead_share)
    assert cost.optimal_saves_per_second(slow) == pytest.approx(cost.optimal_saves_per_second(BERT) / 10)
    for waste in (
        cost.periodic_waste, cost.user_level_jit_waste, cost.transparent_jit_waste,
    ):  # fmt: skip
        assert waste(slow).per_useful_second == pytest.approx(waste(BERT).per_useful_second)


def test_gemini_equation_1() -> None:
    assert cost.average_wasted_seconds(62, 62, 0) == 1.5 * 62
    assert cost.average_wasted_seconds(42, 42, 42) == 105  # MT-NLG, section 2.2
    assert cost.average_wasted_seconds(0, 0, 0) == 0


def test_gemini_equation_2() -> None:
    assert cost.shortest_interval_seconds(480, 62) == 8 * 62
    assert cost.shortest_interval_seconds(0, 62) == 62
    assert cost.shortest_interval_seconds(62, 62) == 62
    with pytest.raises(InvalidInput, match="interval_seconds is 61"):
        cost.average_wasted_seconds(62, 61, 0)


@pytest.mark.parametrize(
    "name", ["failures_per_gpu_day", "save_seconds", "restore_seconds", "overhead_share"]
)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_nonsense_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=rf"^{name} is .* number of at least 0"):
        replace(BERT, **{name: value})  # type: ignore[arg-type]


def test_no_gpus_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^gpus is 0: it must be a whole number of at least 1"):
        replace(BERT, gpus=0)
