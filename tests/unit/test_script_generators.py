"""Generators in the script's variables come back by themselves, by the names that lead to them."""

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from jitckpt.data import generators
from jitckpt.encoding import packed
from jitckpt.state.script_generators import ScriptGenerators
from jitckpt.worker.script_generators import MOST_LOOKED_AT, generators_from


@pytest.fixture(autouse=True)
def _no_generators_are_left() -> Iterator[None]:
    yield
    generators.of_script.clear()


class Noisy(nn.Module):
    """Draws in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.default_rng(8)


class Augment:
    """Has some of its own."""

    def __init__(self) -> None:
        self.rngs = {"noise": random.Random(5), "crop": numpy.random.default_rng(6)}


def built() -> dict[str, Any]:
    """Return what the script builds in every start."""
    return {
        "of_torch": torch.Generator().manual_seed(1),
        "of_python": random.Random(2),
        "new": numpy.random.default_rng(3),
        "old": numpy.random.RandomState(4),
        "augment": Augment(),
        "model": nn.Sequential(Noisy()),
        "listed": [torch.Generator().manual_seed(7)],
    }


def drawn(script: Any) -> list[object]:
    """Draw from all; odd numbers of normal numbers leave one behind that is kept for later."""
    return [
        torch.randn(3, generator=script.of_torch).tolist(),
        script.of_python.gauss(0, 1),
        script.new.normal(),
        script.old.normal(),
        script.augment.rngs["noise"].random(),
        script.augment.rngs["crop"].integers(99),
        script.model[0].rng.normal(),
        torch.rand(1, generator=script.listed[0]).item(),
    ]


def found(kept: ScriptGenerators, script: Any) -> None:
    """Let it find what a function of the script's has in its variables."""

    of_torch, of_python, new, old = script.of_torch, script.of_python, script.new, script.old
    augment, listed, model = script.augment, script.listed, script.model
    kept.follow(generators_from(sys._getframe(), None))
    assert all((of_torch, of_python, new, old, augment, listed, model))


def saved(kept: ScriptGenerators) -> Any:
    return packed.unpack(packed.pack(kept.capture()))


def test_they_go_on_where_they_were_saved() -> None:
    first, again = SimpleNamespace(**built()), SimpleNamespace(**built())
    kept = ScriptGenerators()
    found(kept, first)
    assert kept.names() == [], "none was used yet"
    drawn(first)
    save = saved(kept)
    assert len(kept.names()) == 8
    expected = [drawn(first) for _ in range(3)]
    generators.of_script.clear()
    other = ScriptGenerators()
    found(other, again)
    other.restore(save)
    assert [drawn(again) for _ in range(3)] == expected
    assert other.lacking() == ""


def test_one_that_is_made_later_gets_its_state_when_it_is_found() -> None:
    """As one that each epoch makes anew: a restart goes on in the middle of an epoch."""
    first = SimpleNamespace(**built())
    kept = ScriptGenerators()
    found(kept, first)
    drawn(first)
    save, expected = saved(kept), drawn(first)
    other = ScriptGenerators()
    other.restore(save)
    again = SimpleNamespace(**built())
    found(other, again)
    assert drawn(again) == expected
    next_one = SimpleNamespace(**built())
    found(other, next_one)
    assert drawn(next_one) == drawn(SimpleNamespace(**built())), "the next epoch's begins as it was made"


def test_the_same_is_returned_while_none_is_used_and_what_nobody_finds_is_named_once() -> None:
    script = SimpleNamespace(**built())
    kept = ScriptGenerators()
    found(kept, script)
    assert kept.is_same()
    script.of_python.random()
    assert not kept.is_same()
    assert kept.is_same()
    save = saved(kept)
    other = ScriptGenerators()
    other.restore(save)
    assert "of_python" in other.lacking()
    assert other.lacking() == ""


def test_what_extra_keeps_and_what_belongs_to_the_process_is_left_to_them() -> None:
    class Own:
        def __init__(self) -> None:
            self.rng = random.Random(1)

        def state_dict(self) -> dict[str, Any]:
            return {"rng": self.rng.getstate()}

    own, process, without_state = Own(), torch.default_generator, random.SystemRandom()
    names = [name for name, _ in generators_from(sys._getframe(), own)]
    assert not [name for name in names if "own" in name or name.endswith(("process", "without_state"))]
    assert process is not None
    assert without_state is not None


def test_large_data_are_not_gone_through() -> None:
    script = SimpleNamespace(data=[[[*range(100)] for _ in range(100)] for _ in range(100)])
    looked = 0

    class Counting(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal looked
            for one in super().__iter__():
                looked += 1
                yield one

    data = Counting(Counting(Counting(row) for row in rows) for rows in script.data)
    looked = 0
    assert "noise" not in [name for name, _ in generators_from(sys._getframe(), None)]
    assert 100 < looked < 2 * MOST_LOOKED_AT
    assert data


def test_a_pass_begins_with_their_states_too() -> None:
    script = SimpleNamespace(**built())
    kept = ScriptGenerators()
    found(kept, script)
    of_process = generators.Generators()
    state = packed.pack(of_process.capture())
    first = drawn(script)
    of_process.restore(packed.unpack(state))
    assert drawn(script) == first
    kept.end()
    assert generators.of_script == {}
