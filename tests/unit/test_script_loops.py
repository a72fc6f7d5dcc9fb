"""Which loops over a loader a restart can go on with: those that the loader itself counts."""

import itertools
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from jitckpt.frameworks import script_loops
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


def iterated(loader: object, module: str) -> object:
    """Return what a loop over the loader in this module gets."""
    scope: dict[str, Any] = {"__name__": module, "loader": loader}
    exec("found = [*loader]", scope)
    return scope["found"]


def test_torchdatas_loader_is_asked_for_too_but_not_by_the_pass_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StatefulDataLoader(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(["the loader's own"])

    torchdatas = ModuleType("torchdata of this test")
    torchdatas.StatefulDataLoader = StatefulDataLoader  # type: ignore[attr-defined]
    monkeypatch.setattr(script_loops, "_begin_pass", [lambda loader, frame: iter(["the pass's"])])
    script_loops.install(torchdatas)
    loader = StatefulDataLoader([1])  # type: ignore[arg-type]
    assert iterated(loader, "__main__") == ["the pass's"]
    assert iterated(loader, "jitckpt.hooks.torch_loaders") == ["the pass's"]  # around the script's
    assert iterated(loader, "jitckpt.data.data_pass") == ["the loader's own"]
