"""torch's ways to train in parallel give on softgpu, bit for bit, what they give on the CPU with gloo."""

import json
import subprocess
import sys

import pytest
from conftest import PROGRAMS

RANKS = 8
TOOLS = (
    "ddp",
    "ddp, gradient_as_bucket_view",
    "ddp, static_graph",
    "ddp, find_unused_parameters",
    "ddp, no_sync",
    "ZeroRedundancyOptimizer",
    "fsdp2, replicate and shard",
    "fsdp2, half precision, clipped",
    "fsdp1, HYBRID_SHARD",
    "tensor parallel",
    "pipeline, 1F1B",
    "pipeline, interleaved",
    "pipeline x data x tensor",
    "eight ranks in order",
)


@pytest.fixture(scope="module")
def equal(softgpu_environment: dict[str, str]) -> dict[str, list[bool]]:
    """Per tool, whether each rank's numbers are the same; one set of processes does all, to spare imports."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAMS / "parallel.py")],
        env=softgpu_environment | {"SOFTGPU_DEVICES": str(RANKS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, list[bool]] = json.loads(ended.stdout.splitlines()[-1])
    assert set(found) == set(TOOLS)
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_equals_cpu_with_gloo(equal: dict[str, list[bool]], tool: str) -> None:
    assert equal[tool] == [True] * RANKS
