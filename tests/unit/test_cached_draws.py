"""A function that keeps what it returns, and draws random numbers for it, is named once it has in a loop."""

import functools
import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from jitckpt.worker.cached_draws import CachedDraws


def noise() -> Tensor:
    return torch.randn(2)


@functools.cache
def drawn(number: int) -> Tensor:
    return number * noise()


@functools.lru_cache(maxsize=2)
def seeded(number: int) -> Tensor:
    return torch.randn(2, generator=torch.Generator().manual_seed(number))


@functools.cache
def computed(number: int) -> int:
    return number * number


class Projection:
    def __init__(self) -> None:
        self.rate = 1.0

    @functools.cached_property
    def matrix(self) -> Tensor:
        return torch.randn(2, 2)

    @functools.cached_property
    def size(self) -> int:
        return 2

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def chosen(self, number: int) -> float:
        return random.random() * number


def no_keeping(frame: FrameType, name: str) -> bool:
    return False


def named(said: list[str]) -> list[str]:
    return sorted(text.split()[0] for text in said)


def test_what_a_loop_draws_and_keeps_is_named_once() -> None:
    said: list[str] = []
    cached, projection = CachedDraws(said.append), Projection()
    cached.loop_begins(sys._getframe())
    for step in range(4):
        used: list[Any] = [drawn(step), seeded(step), computed(step), projection.chosen(step)]
        used += [projection.matrix, projection.size]
        cached.look(sys._getframe(), no_keeping)
        assert len(used) == 6
    assert named(said) == ["Projection.chosen", "drawn", "projection.matrix"]
    assert "Call it before the loop" in said[0]


def test_what_is_drawn_before_the_loop_is_not() -> None:
    said: list[str] = []
    cached, projection = CachedDraws(said.append), Projection()
    drawn(1), projection.chosen(2)
    assert projection.matrix.shape == (2, 2)
    cached.loop_begins(sys._getframe())
    for _ in range(4):
        assert drawn(1).shape == projection.matrix[0].shape
        projection.chosen(2)
        cached.look(sys._getframe(), no_keeping)
    assert said == []


def test_a_cached_property_is_kept_where_it_can_be() -> None:
    cached, projection = CachedDraws(pytest.fail), Projection()
    cached.loop_begins(sys._getframe())
    asked: list[str] = []

    def keep(frame: FrameType, name: str) -> bool:
        assert frame.f_locals["projection"] is projection
        asked.append(name)
        return True

    assert projection.matrix.shape == (2, 2)
    for _ in range(3):
        cached.look(sys._getframe(), keep)
    assert asked == ["projection.matrix"]
