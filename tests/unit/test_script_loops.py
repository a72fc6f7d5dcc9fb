"""Which loops over a loader a restart can go on with: those that the loader itself counts."""

import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jitckpt.frameworks.script_loops import why_not


class Loader:
    frame: FrameType

    def __iter__(self) -> Iterator[int]:
        self.frame = sys._getframe(1)
        self.refusal = why_not(self.frame)
        return iter([1, 2])


def test_a_for_statement_can_go_on() -> None:
    loader = Loader()
    for _ in loader:
        pass
    assert loader.refusal is None


def test_counting_it_can_go_on() -> None:
    loader = Loader()
    for _ in enumerate(loader):
        pass
    assert loader.refusal is None


def test_batches_drawn_by_hand_can_not() -> None:
    loader = Loader()
    next(iter(loader))
    assert loader.refusal is not None
    assert "for batch in loader" in loader.refusal


def test_batches_over_and_over_can_not() -> None:
    loader = Loader()
    next(itertools.cycle(loader))
    assert loader.refusal is not None


def test_a_generator_of_the_scripts_can_not() -> None:
    loader = Loader()

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    next(forever())
    assert loader.refusal is not None
