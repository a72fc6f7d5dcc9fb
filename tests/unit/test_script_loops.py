"""Which loops over a loader a restart can go on with: those that the loader itself counts."""

import itertools
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader

from jitckpt.data import progress_bars
from jitckpt.data.loop import Loop
from jitckpt.frameworks import script_loops
from jitckpt.frameworks.script_loops import why_not


@pytest.fixture
def new_loop() -> Loop:
    return Loop(
        begins=lambda: None,
        boundary=lambda frame: True,
        write_again=lambda: None,
        put_back=lambda: None,
        warn=pytest.fail,
    )


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


def bar(loader: Any) -> Any:
    """Return a progress bar as tqdm.auto's: it asks for an iterator as it is made, and draws from another."""
    text = """
class Bar:
    def __init__(self, iterable):
        self.iterable, self.asked = iterable, iter(iterable)

    def __iter__(self):
        yield from self.iterable
"""
    names = {"__name__": "tqdm.asyncio"}
    exec(text, names)
    return names["Bar"](loader)  # type: ignore[operator]


class Counting:
    """A loader that notes which of its passes are begun."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += not progress_bars.makes_one(sys._getframe(1))
        return iter([1, 2])


def test_a_progress_bar_that_is_only_made_begins_no_pass() -> None:
    loader = Counting()
    assert [*bar(loader)] == [1, 2]
    assert loader.begun == 1


def test_a_progress_bar_around_batches_begins_one_pass(new_loop: Loop) -> None:
    batches = new_loop.batches(DataLoader([1, 2, 3, 4]))  # type: ignore[arg-type]
    for _ in range(2):
        assert len([*bar(batches)]) == 4
    assert new_loop.round[2] == 2


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
