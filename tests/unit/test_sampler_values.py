"""What the script sets in samplers of its own is kept, whichever pass runs meanwhile."""

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from jitckpt.worker import sampler_values
from jitckpt.worker.holders import held_by, reach
from jitckpt.worker.script_variables import ScriptVariables


class Ranked(Sampler[int]):
    """Its weights are what the script says, its queue and its count are its own affair."""

    def __init__(self) -> None:
        self.level, self.name, self.weights, self.drawn, self.start = 0, "easy", torch.ones(4), 0, 0
        self.made: Any = object()

    def __iter__(self) -> Iterator[int]:
        self.drawn = self.drawn + 1
        self._begin()
        return iter([int(torch.argmax(self.weights)) * self.level] * 4)

    def _begin(self) -> None:
        self.start = self.level


class Queued(Sampler[int]):
    def __init__(self) -> None:
        self.queue, self.level = [0, 1, 2], 0

    def __iter__(self) -> Iterator[int]:
        while self.queue:
            yield self.queue.pop() + self.level


class Trainer:
    def __init__(self) -> None:
        self.sampler = Ranked()


def found_here(kept: set[object] = set()) -> set[str]:  # noqa: B006
    frame = sys._getframe(1)
    return {one.name for one in sampler_values.set_in(frame, {**frame.f_locals}, kept)}


def test_what_no_draw_changes_is_the_scripts() -> None:
    ranked, queued, of_torch = Ranked(), Queued(), RandomSampler(range(4))
    assert found_here() == {"ranked.level", "ranked.name", "ranked.weights", "queued.level"}
    assert [*of_torch, *queued] != []
    assert found_here({id(queued), (id(ranked), "level")}) == {"ranked.name", "ranked.weights"}


def test_they_are_found_in_loaders_and_in_objects() -> None:
    loader: Any = DataLoader([1, 2, 3, 4], sampler=Queued())  # type: ignore[arg-type]
    trainer = Trainer()
    assert found_here() == {
        "loader.sampler.level",
        "trainer.sampler.level",
        "trainer.sampler.name",
        "trainer.sampler.weights",
    }
    assert reach({"loader": loader}, "loader.sampler.level") == 0
    held = held_by(trainer.sampler)
    assert held is not None
    held.update({"level": 3})
    assert trainer.sampler.level == 3


def test_a_loop_over_another_loader_keeps_them() -> None:
    followed: set[str] = set()
    places: dict[str, tuple[str, str]] = {}
    said: list[str] = []
    keeper = Mock(follow=lambda frame, names: followed.update(names), note=places.update)
    variables = ScriptVariables([], None, lambda: 0, said.append, keeper=lambda: keeper)
    sampler = Ranked()
    loader = DataLoader([1, 2, 3, 4], sampler=sampler)  # type: ignore[arg-type,var-annotated]

    def steps() -> Iterator[int]:
        for step in range(3):
            variables.look(sys._getframe(1))
            yield step

    for _ in steps():
        sampler.level += 2
        sampler.weights[0] += 1
    assert {"sampler.level", "sampler.weights"} <= followed
    of_function = f"{__name__}:test_a_loop_over_another_loader_keeps_them"
    assert places["sampler.level"] == (f"{of_function}:sampler", "level")
    assert said == [], "what is kept is not named"
    assert len([*loader]) == 4
