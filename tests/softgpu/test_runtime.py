"""Streams, events, memory, failures and the end of the process, as real torch sees them."""

from collections.abc import Callable

import pytest
from conftest import Run

Whole = Callable[..., str]


def test_torch_moves_data_on_streams(run_whole: Whole) -> None:
    assert run_whole("move_data").splitlines()[-1] == "all equal"


def test_a_stream_waits_for_an_event(run_whole: Whole) -> None:
    """By the third way torch itself does not: its FSDP2 frees by it what was gathered and nobody used.

    Where that is another number some day, torch's FSDP2 may accumulate in tests/frameworks, too.
    """
    assert run_whole("wait_for_events").splitlines() == [
        "torch.cuda's stream and event True",
        "any device's stream and event True",
        "any device's stream, torch.cuda's event False",
    ]


def test_gradients_are_told_that_lie_in_one_piece_on_a_gpu(run_whole: Whole) -> None:
    assert run_whole("gradients").splitlines() == ["True True"]


def test_out_of_memory_is_torchs_own_error(run_whole: Whole) -> None:
    lines = run_whole("fill_memory").splitlines()
    assert lines[0].startswith(
        "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of"
    )
    assert lines[1] == "freed"


def test_the_host_can_not_touch_device_memory(run_program: Run) -> None:
    ended = run_program("touch_device_memory")
    assert ended.stdout == "about to read\n"
    assert ended.returncode == -11


def test_the_use_of_freed_memory_is_a_sticky_error(run_whole: Whole) -> None:
    error = run_whole("use_freed_memory")
    assert error.startswith("CUDA error: an illegal memory access was encountered: work on a stream used the")


def test_what_is_not_there_fails_by_name(run_whole: Whole) -> None:
    kernels = (
        "runs no kernels of torch.compile's or Triton's: train without,"
        " or with the backends aot_eager or cudagraphs"
    )
    refusal = (
        "RuntimeError: CUDA driver error: operation not supported: softgpu has no cuModuleLoad and " + kernels
    )
    assert run_whole("use_what_is_missing").splitlines() == [refusal, refusal]


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        ("expandable_segments:True", "cuMemAddressReserve"),
        (
            "backend:cudaMallocAsync",
            "cudaDeviceGetDefaultMemPool and no memory pools: use torch's own allocator"
            " (no backend:cudaMallocAsync), or cudaMalloc",
        ),
    ],
)
def test_other_allocators_fail_by_name(run_program: Run, setting: str, missing: str) -> None:
    ended = run_program("allocator", setting)
    assert f"operation not supported: softgpu has no {missing}\n" in ended.stderr


def test_a_forked_child_has_no_device(run_whole: Whole) -> None:
    assert "initialization error: a forked process can't use the device" in run_whole("fork_after_use")


def test_exit_keeps_its_status_while_a_thread_waits_for_a_hung_stream(run_program: Run) -> None:
    ended = run_program("exit_while_waiting")
    assert (ended.returncode, ended.stderr) == (5, "")


def test_work_may_be_queued_at_exit(run_program: Run) -> None:
    ended = run_program("exit_with_work")
    assert (ended.returncode, ended.stderr) == (0, "")
