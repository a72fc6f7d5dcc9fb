"""Which devices are suspect, and which a restart takes instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.suspects import NoDeviceError, Suspects, visible_devices, without


def test_a_rank_that_fails_twice_on_a_device_makes_it_suspect() -> None:
    suspects = Suspects()
    assert not suspects.note(1, "1")
    assert not suspects.note(0, "1"), "another rank: perhaps the fault of neither device"
    assert not suspects.note(1, "2")
    assert suspects.devices == frozenset()
    assert suspects.note(1, "1")
    assert suspects.devices == {"1"}
    assert not suspects.note(1, "1"), "it is told once"


def test_the_devices_are_those_that_a_program_sees() -> None:
    assert visible_devices({}, 3) == ("0", "1", "2")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-8f2e,1"}, 8) == ("3", "GPU-8f2e", "1")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, 8) == ()


def test_a_free_device_takes_the_place_of_a_suspect_one() -> None:
    assert without(("0", "1", "2", "3"), {"1"}, 2) == ["0", "2", "3"]
    assert without(("0", "1", "2", "3"), {"1", "2"}, 2) == ["0", "3"]
    assert without(("0", "1", "2"), {"2"}, 2) == ["0", "1"]


def test_without_a_free_device_it_says_so() -> None:
    with pytest.raises(
        NoDeviceError, match="2 ranks need a device each, device 1 is suspect, and 0 others are free"
    ):
        without(("0", "1"), {"1"}, 2)
    with pytest.raises(NoDeviceError, match="device 0 and 1 is suspect, and 1 other is free"):
        without(("0", "1", "2"), {"0", "1"}, 2)


@given(st.integers(1, 8), st.integers(1, 8), st.sets(st.integers(0, 9).map(str)))
def test_no_rank_gets_a_suspect_device_and_the_others_keep_theirs(
    count: int, ranks: int, bad: set[str]
) -> None:
    devices = visible_devices({}, count)
    try:
        chosen = without(devices, bad, ranks)
    except NoDeviceError:
        assert len(set(devices) - bad) < min(ranks, count)
        return
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) == set(devices) - bad
    assert all(chosen[rank] == device for rank, device in enumerate(devices[:ranks]) if device not in bad)
