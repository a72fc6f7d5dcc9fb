"""Ranks of a job on softgpu together do what one process does."""

from collections.abc import Callable


def test_two_ranks_equal_one_process(run_ranks: Callable[[str], None]) -> None:
    run_ranks("ranks")
