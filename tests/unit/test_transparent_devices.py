"""Which devices are broken for good, and what takes their places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.transparent.devices import Devices, is_of_the_device

LOST = "CUDA error 999: unknown error"
DEVICES = Devices.of_ranks(["0", "1", "2", "3"], [4, 5])


@pytest.mark.parametrize(
    ("error", "of_the_device"),
    [
        (LOST, True),
        ("CUDA error 214: uncorrectable ECC error encountered", True),
        ("NCCL error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", True),
        ("The device proxy's server (process 7) ended with status 1 before it was ready.", True),
        ("the device proxy's server (process 7) ended with status 1", True),  # its device was lost under it
        ("CUDA error 700: an illegal memory access was encountered", False),
        ("CUDA error 710: device-side assert triggered", False),
        ("NCCL error 2: unhandled system error", False),
        ("the device has given no answer for 60 s", False),
        ("The device proxy's server (process 7) was ended by Killed.", False),
        ("", False),
    ],
)
def test_errors_that_another_device_would_not_have(error: str, of_the_device: bool) -> None:
    assert is_of_the_device(error) == of_the_device


def test_a_device_is_broken_once_a_new_server_has_failed_on_it_from_the_same_state() -> None:
    once = DEVICES.stopped(5, 7, LOST)
    assert not once.is_broken(5)
    assert not once.stopped(5, 9, LOST).is_broken(5)  # it had come on
    assert not once.stopped(4, 7, LOST).is_broken(5)  # that is another rank
    assert not once.stopped(5, 7, "CUDA error 700: an illegal memory access").is_broken(5)
    assert not once.stopped(5, 7, "").is_broken(5)
    twice = once.stopped(5, 7, LOST)
    assert twice.is_broken(5)
    assert not twice.is_broken(4)


def test_a_free_device_takes_its_place_until_there_is_none() -> None:
    devices = DEVICES.stopped(5, 7, LOST).stopped(5, 7, LOST)
    assert devices.free == ("2", "3")
    devices = devices.exchanged(5) or devices
    assert (devices.of, devices.free, devices.is_broken(5)) == ({4: "0", 5: "2"}, ("3",), False)
    devices = devices.stopped(5, 7, LOST)
    assert not devices.is_broken(5)  # the first time on this one
    devices = devices.stopped(5, 7, LOST)
    devices = devices.exchanged(5) or devices
    devices = devices.stopped(5, 7, LOST).stopped(5, 7, LOST)
    assert devices.broken == {"1", "2", "3"}
    assert devices.exchanged(5) is None


@pytest.mark.parametrize(
    ("listed", "visible"),
    [
        (None, "0,3,2,1"),
        ("0,1,2,3", "0,3,2,1"),
        ("1", "3"),  # a program that has left the others out itself
        ("GPU-a, 1", "GPU-a,3"),
    ],
)
def test_the_program_calls_its_device_as_before(listed: str | None, visible: str) -> None:
    assert DEVICES.visible("1", "3", listed) == visible


@given(st.lists(st.tuples(st.sampled_from([4, 5]), st.integers(0, 2), st.sampled_from([LOST, ""]))))
def test_no_device_is_given_twice_nor_once_it_is_broken(story: list[tuple[int, int, str]]) -> None:
    devices = DEVICES
    for rank, state, error in story:
        devices = devices.stopped(rank, state, error)
        if devices.is_broken(rank) and (exchanged := devices.exchanged(rank)):
            assert exchanged.of[rank] not in {*devices.of.values(), *devices.broken}
            devices = exchanged
        assert len(set(devices.of.values())) == 2
        assert not {*devices.free} & {*devices.of.values(), *devices.broken}
