"""The state of the random number generators."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from jitckpt import tree_codec
from jitckpt.random_state import RandomState

SOURCES: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "numpy": lambda: float(numpy.random.rand()),
    "numpy normal": lambda: float(numpy.random.randn()),
    "torch": lambda: float(torch.rand(1)),
    "torch normal": lambda: torch.randn(17).tolist(),
}


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_the_numbers_after_it_come_again(name: str, before: int) -> None:
    state = RandomState(None)
    state.capture()
    draw = SOURCES[name]
    for _ in range(before):
        draw()
        state.capture()  # must not hide what the next one has to see
    taken = state.capture()
    expected = [draw() for _ in range(5)]
    tree = json.loads(json.dumps(taken.tree))
    state.restore(tree_codec.decode(tree, taken.tensors))
    assert [draw() for _ in range(5)] == expected
    state.restore(tree_codec.decode(tree, taken.tensors))
    again = state.capture()
    assert again.tree == taken.tree
    assert all(torch.equal(again.tensors[key], taken.tensors[key]) for key in taken.tensors)


def test_another_numpy_generator_is_kept_too() -> None:
    functions: Any = numpy.random  # two that its stubs do not export
    before = functions.get_bit_generator()
    functions.set_bit_generator(numpy.random.PCG64(3))
    try:
        state = RandomState(None)
        numpy.random.rand()
        taken = state.capture()
        expected = numpy.random.rand(4).tolist()
        state.restore(tree_codec.decode(taken.tree, taken.tensors))
        assert numpy.random.rand(4).tolist() == expected
    finally:
        functions.set_bit_generator(before)
