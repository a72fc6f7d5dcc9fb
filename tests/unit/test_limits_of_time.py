"""Time limits that don't go together are named, both of them."""

import pytest

from jitckpt.decisions.limits import Limits, conflicts

USUAL = Limits(hang_timeout=None, stall_timeout=540, save_deadline=60, recovery_deadline=None)


def test_the_defaults_go_together() -> None:
    assert conflicts(USUAL) == []
    assert conflicts(Limits(60, 540, 60, 120)) == []


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(60, 10, 60, None), ["--stall-timeout 10", "--hang-timeout 60"]),
        (Limits(None, 540, 120, None), ["--stall-timeout 540", "--save-deadline 120", "600 s"]),
        (Limits(580, 590, 60, None), ["--stall-timeout 590", "--save-deadline 60"]),
        (Limits(60, 540, 60, 30), ["--recovery-deadline 30", "--hang-timeout 60"]),
        (Limits(60, 540, 60, 60), ["--recovery-deadline 60", "--hang-timeout 60"]),
    ],
)
def test_two_that_do_not_are_named(limits: Limits, named: list[str]) -> None:
    (sentence,) = conflicts(limits)
    assert [name for name in named if name not in sentence] == []


def test_nothing_is_saved_under_a_deadline_in_transparent_mode() -> None:
    assert conflicts(Limits(60, 540, 3600, 120)) == []
