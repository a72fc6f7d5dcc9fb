"""What operators on softgpu give, when they run, and how they fail."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SWEEP = Path(__file__).parents[2] / "scripts" / "softgpu_sweep.py"


def test_special_operators_equal_cpu(run_whole: Callable[..., str]) -> None:
    run_whole("operators")


def test_comparison_of_the_sweep_sees_every_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SWEEP.parent))
    import torch
    from operator_comparison import first_difference

    ones = torch.ones(2, 3)
    assert first_difference([ones, 1], [ones.clone(), 1], values=True) == ""
    nan = torch.tensor([float("nan"), 0.0])
    assert first_difference(nan, nan.clone(), values=True) == ""
    for other in (
        torch.nextafter(ones, ones + 1),
        ones.double(),
        ones[:1],
        torch.ones(3, 2).t(),
        ones.to_sparse(),
        [ones, ones],
        3,
    ):
        assert first_difference(ones, other, values=True) != "", other
    assert "1 of 2 elements" in first_difference(nan, torch.tensor([float("nan"), -0.0]), values=True)
    assert first_difference(ones, ones + 1, values=False) == ""


def test_slice_of_torchs_operator_database(softgpu_environment: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    ended = subprocess.run(
        [sys.executable, str(SWEEP), "--shard", "7/100", "--json", str(results)],
        env=softgpu_environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = json.loads(results.read_text())["counts"]
    assert counts["passed"] > 40
    assert "failed" not in counts


def test_random_numbers_repeat(run_whole: Callable[..., str]) -> None:
    run_whole("randomness")


def test_buffers_come_off_the_device_as_they_are(run_whole: Callable[..., str]) -> None:
    run_whole("captured_buffers")


def test_host_runs_ahead(run_whole: Callable[..., str]) -> None:
    run_whole("asynchronous")


def check_errors(run_whole: Callable[..., str], expected: dict[str, tuple[str, str]]) -> None:
    errors: list[str] = json.loads(run_whole("failing", *expected))
    for error, (kind, text) in zip(errors, expected.values(), strict=True):
        assert error.split(":")[0].endswith(kind)
        assert text in error


def test_errors_found_at_once(run_whole: Callable[..., str]) -> None:
    devices = ("RuntimeError", "Expected all tensors to be on the same device")
    check_errors(
        run_whole,
        {
            "no such operator": ("NotImplementedError", "softgpu has no operator aten::_cslt_compress"),
            "sparse": ("NotImplementedError", "no operator aten::_to_sparse that returns a Sparse tensor"),
            "sparse operator": ("NotImplementedError", "no operator aten::mm for sparse tensors"),
            "shapes": ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)"),
            "dimension": ("IndexError", "Dimension out of range"),
            "host tensor": devices,
            "two devices": devices,
            "written host tensor": devices,
            "overflow": ("RuntimeError", "value cannot be converted to type uint8_t without overflow"),
            "not positive": ("LinAlgError", "not positive-definite"),
            "host generator": ("RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'"),
        },
    )


def test_error_of_the_data_stays_with_the_device(run_whole: Callable[..., str]) -> None:
    text = "aten::index_select failed on the device: index out of range in self"
    check_errors(
        run_whole,
        {"index out of range": ("AcceleratorError", text), "after a failure": ("AcceleratorError", text)},
    )
