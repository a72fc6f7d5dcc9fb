import math

import pytest
from survival_times import sampled_job_survival, seconds_until

from jitckpt.decisions.check import InvalidInput
from jitckpt.planning.survival import (
    Weibull,
    group_survival,
    job_survival,
)


def test_weibull() -> None:
    life = Weibull(100.0, 2.0)
    assert life.alive(0) == 1
    assert life.alive(100) == pytest.approx(math.exp(-1))
    assert life.alive(50) + life.failed(50) == pytest.approx(1)
    assert Weibull.of_mean(10.0).scale_seconds == pytest.approx(10.0)
    assert Weibull.of_mean(10.0, 0.5).scale_seconds == pytest.approx(5.0)  # gamma(3) = 2
    assert Weibull(1000.0, 2.0).alive(500) == pytest.approx(life.alive(50))  # all times by ten


def test_groups_without_protection_are_all_nodes_alive() -> None:
    node = Weibull(100.0, 1.3)
    assert job_survival(node, 24, 8, 0, 5.0) == pytest.approx(node.alive(5.0) ** 24)


def test_limits() -> None:
    node = Weibull(100.0, 1.3)
    for losses in range(5):
        assert job_survival(node, 8, 4, losses, 0.0) == 1.0
    assert job_survival(node, 8, 4, 4, 1e6) == 1.0  # everything may be lost
    assert job_survival(node, 1, 1, 0, 10.0) == node.alive(10.0)
    assert job_survival(node, 8, 4, 1, 1e9) == 0.0
    chances = [job_survival(node, 64, 8, losses, 20.0) for losses in range(9)]
    assert chances == sorted(chances)


@pytest.mark.parametrize("losses", [0, 1, 2])
@pytest.mark.parametrize("shape", [0.7, 1.0, 1.5])
def test_agrees_with_drawing_every_node(losses: int, shape: float) -> None:
    """ARC and AEC survive one loss a group, both together two, none none."""
    node = Weibull.of_mean(1000.0, shape)
    seconds = seconds_until(node, 64, 8, losses, 0.5)
    expected = job_survival(node, 64, 8, losses, seconds)
    assert expected == pytest.approx(0.5)
    share, error = sampled_job_survival(node, 64, 8, losses, seconds, samples=20_000, seed=3)
    assert abs(share - expected) < 4 * error


def test_small_chances_keep_their_digits() -> None:
    node = Weibull(1e9)
    assert 1 - group_survival(node, 8, 0, 1.0) == pytest.approx(8e-9, rel=1e-6)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nodes is 10: it must be a multiple of the 4 members"):
        job_survival(Weibull(1.0), 10, 4, 1, 1.0)
    with pytest.raises(InvalidInput, match="survives_losses is 5"):
        group_survival(Weibull(1.0), 4, 5, 1.0)
    with pytest.raises(InvalidInput, match="shape is 0"):
        Weibull(1.0, 0.0)
    with pytest.raises(InvalidInput, match="seconds is -1"):
        Weibull(1.0).alive(-1)
