"""Jobs that CUDA gives one queue for all streams."""

import pytest

from jitckpt.worker.one_connection import VARIABLE, warn_of_it


@pytest.mark.parametrize(
    ("world_size", "environment", "warns"),
    [
        (2, {VARIABLE: "1"}, True),
        (1, {VARIABLE: "1"}, False),
        (2, {VARIABLE: "8"}, False),
        (2, {}, False),
    ],
)
def test_one_queue_for_all_streams_is_named(
    world_size: int, environment: dict[str, str], warns: bool
) -> None:
    said: list[str] = []
    warn_of_it(world_size, environment, said.append)
    assert [VARIABLE in text for text in said] == [True] * warns
