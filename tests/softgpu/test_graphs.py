"""CUDA graphs give the bits of the same training without them."""

import json
from collections.abc import Callable

import pytest

WAYS = ("whole_step", "two_graphs_of_one_pool", "graphed_callables", "side_streams", "compiled")


@pytest.fixture(scope="module")
def differences(run_whole: Callable[..., str]) -> dict[str, list[str]]:
    """The names of what differs from the eager run, for each way; one process does all, to spare imports."""
    found: dict[str, list[str]] = json.loads(run_whole("graphs", *WAYS).splitlines()[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_equals_eager(differences: dict[str, list[str]], way: str) -> None:
    assert differences[way] == []


def test_ranks_with_their_collectives_in_a_graph_equal_eager_ones(run_ranks: Callable[[str], None]) -> None:
    run_ranks("graphed_ranks")


def test_what_can_not_be_captured_fails_and_harms_nothing(run_whole: Callable[..., str]) -> None:
    unsupported = "CUDA error: operation not permitted when stream is capturing"
    lines = run_whole("graphs_that_fail").splitlines()
    assert len(lines) == 5
    assert all(line.startswith(unsupported) for line in lines[:4]), lines
    assert "torch.cuda.Event(external=True)" in lines[4]
