"""The state of the random number generators."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from jitckpt.data.random_state import RandomState, TorchState
from jitckpt.encoding import tree_codec

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


def test_a_numpy_generator_that_takes_the_place_of_another_is_noticed() -> None:
    functions: Any = numpy.random
    before = functions.get_bit_generator()
    state = RandomState(None)
    functions.set_bit_generator(numpy.random.MT19937(3))
    try:
        first = state.capture()
        assert state.capture() is first
        functions.set_bit_generator(numpy.random.MT19937(4))
        taken = state.capture()
        expected = numpy.random.rand(4).tolist()
        state.restore(tree_codec.decode(taken.tree, taken.tensors))
        assert numpy.random.rand(4).tolist() == expected
        assert taken is not first
    finally:
        functions.set_bit_generator(before)


@pytest.mark.parametrize("name", SOURCES)
def test_what_no_generator_has_changed_is_not_made_anew(name: str) -> None:
    state = RandomState(None)
    SOURCES["python normal"]()  # keeps a second number, and the next one gives that away
    SOURCES["python normal"]()
    numpy.random.seed(1)
    taken = state.capture()
    assert state.capture() is taken
    SOURCES[name]()
    assert state.capture() is not taken


@pytest.mark.parametrize("change", ["seed", "a whole round"])
@pytest.mark.parametrize("module", [random, numpy.random], ids=["python", "numpy"])
def test_a_change_that_leaves_the_index_where_it_was_is_seen(module: Any, change: str) -> None:
    state = RandomState(None)
    module.seed(1)
    for seed in range(2, 5):
        before = state.capture()
        if change == "seed":
            module.seed(seed)
        else:  # a number of 53 bits takes two of the 624
            for _ in range(312):
                module.random()
        now = state.capture()
        assert now is not before
        expected = module.random()
        state.restore(tree_codec.decode(now.tree, now.tensors))
        assert module.random() == expected
        state.restore(tree_codec.decode(now.tree, now.tensors))


def test_a_generator_that_hides_its_memory_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = random.Random(7)

    def hidden() -> Any:
        return own.getstate()

    monkeypatch.setattr(random, "getstate", hidden)
    state = RandomState(None)
    before = state.capture()
    own.random()
    assert state.capture().tensors["random.raw"].tolist() != before.tensors["random.raw"].tolist()


def test_whatever_is_done_with_torchs_generator_is_seen() -> None:
    state = TorchState(torch.default_generator)
    assert state._peeked, "its memory is not as it was in the versions of torch that are known"
    kept = torch.get_rng_state()

    def set_kept() -> None:
        torch.set_rng_state(kept)

    choose = random.Random(5)
    uses: list[Callable[[], object]] = [
        lambda: torch.rand(choose.randint(1, 700)),
        lambda: torch.manual_seed(choose.randint(0, 3)),
        lambda: torch.randn(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.randperm(10),
        set_kept,
        lambda: None,
    ]
    for number in range(3000):
        choose.choice(uses)()
        if number % 20 == 0:
            kept = torch.get_rng_state()
        assert state.capture() == torch.get_rng_state().numpy().tobytes()
